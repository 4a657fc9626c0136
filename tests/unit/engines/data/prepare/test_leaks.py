"""Training rows that share words with held-out ones: which, with what, and what becomes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.data import ArithmeticConfig, DataConfig, DecontaminationConfig, SourceConfig
from engines.config.model import ModelConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.decontamination import Leak, find_leaks
from engines.data.read.dataset import load_dataset
from engines.data.read.rows import Message, RewardModel, RLRow, SFTRow
from infra.errors import ConfigError

PRETRAINED = ModelConfig(path="/nowhere")
RUN = "a farmer has seven red hens and each of them lays four eggs"
LEAKED = f"Yesterday {RUN} a day, he said."
HELD_OUT = f"{RUN} per week. How many eggs are that?"
OTHER = "Some other question about trains that leave two stations at noon and meet."


def write(path: Path, rows: list[dict[str, Any]], layout: str) -> tuple[SourceConfig, ...]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (SourceConfig(path=str(path), format=layout),)


def chat(question: str, answer: str) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer}
    return {"messages": [{"role": "user", "content": question}, said]}


def problem(question: str) -> dict[str, Any]:
    return {"prompt": question, "reward_model": {"style": "rule", "ground_truth": "28"}}


def pair(question: str, chosen: str) -> dict[str, Any]:
    return {"prompt": question, "chosen": chosen, "rejected": "no"}


def data(directory: Path, action: str = "remove", **fields: Any) -> DataConfig:
    directory.mkdir(exist_ok=True)
    return DataConfig(
        sft=write(
            directory / "sft.jsonl", [chat("s0", "y"), chat("s1", LEAKED), chat(OTHER, "y")], "auto"
        ),
        rl=write(directory / "rl.jsonl", [problem(HELD_OUT.upper()), problem(OTHER)], "rows"),
        preference=write(
            directory / "p.jsonl", [pair("p0", LEAKED), pair("p1", "y"), pair("Why?", "z")], "pairs"
        ),
        evaluation=write(directory / "e.jsonl", [problem("e0"), problem(HELD_OUT)], "rows"),
        preference_evaluation=write(directory / "pe.jsonl", [pair("why", "x")], "pairs"),
        **{"decontamination": {"action": action}, **fields},
    )


def test_rows_that_leak_are_left_out_counted_and_reported(tmp_path: Path) -> None:
    summary = build_dataset(data(tmp_path / "in"), PRETRAINED, 0, tmp_path / "out")
    dataset = load_dataset(tmp_path / "out")
    assert [row.prompt[0].content for row in dataset.sft_rows()] == ["s0", OTHER]
    assert [row.prompt[0].content for row in dataset.rl_rows()] == [OTHER]
    assert [row.prompt[0].content for row in dataset.preference_rows()] == ["p1"]
    assert len(dataset.evaluation_rows()) == 2
    assert summary.num_decontaminated == {"sft": 1, "rl": 1, "preference": 2}
    assert dataset.summary()["num_decontaminated"] == {"sft": 1, "rl": 1, "preference": 2}
    report = json.loads((tmp_path / "out/decontamination.json").read_text(encoding="utf-8"))
    places = [
        (each["split"], each["row"], each["kind"], each["evaluation_split"], each["evaluation_row"])
        for each in report["leaks"]
    ]
    assert places == [
        ("sft", 1, "run", "evaluation", 1),
        ("rl", 0, "exact", "evaluation", 1),
        ("preference", 0, "run", "evaluation", 1),
        ("preference", 2, "exact", "preference_evaluation", 0),
    ]
    assert report["leaks"][0]["words"] == RUN
    assert report["num_rows"]["preference_evaluation"] == 1


def test_equal_runs_give_equal_reports(tmp_path: Path) -> None:
    names = ("decontamination.json", "summary.json", "rl.parquet")
    for name in ("a", "b"):
        build_dataset(data(tmp_path / "in"), PRETRAINED, 0, tmp_path / name)
    for file in names:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_without_the_section_nothing_is_looked_for_or_said(tmp_path: Path) -> None:
    config = data(tmp_path / "in", decontamination=None)
    build_dataset(config, PRETRAINED, 0, tmp_path / "out")
    assert not (tmp_path / "out/decontamination.json").exists()
    assert "num_decontaminated" not in load_dataset(tmp_path / "out").summary()
    assert len(load_dataset(tmp_path / "out").sft_rows()) == 3


def test_a_leak_can_stop_the_stage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_dataset(data(tmp_path / "in", "refuse"), PRETRAINED, 0, tmp_path / "out")
    assert str(caught.value).startswith(
        "data.decontamination: got 4 training rows that share words with held-out ones (first: sft "
        f"row 1 and evaluation row 1: '{RUN}'); need none"
    )
    assert not (tmp_path / "out").exists()


def test_a_split_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    config = data(tmp_path / "in")
    leaked = write(tmp_path / "rl.jsonl", [problem(HELD_OUT)], "rows")
    with pytest.raises(ConfigError, match=r"^data\.rl: got 1 rows, all of which share words"):
        build_dataset(config.model_copy(update={"rl": leaked}), PRETRAINED, 0, tmp_path / "out")


def test_equal_prompts_that_were_removed_need_no_permission(tmp_path: Path) -> None:
    words = "three words only"
    splits = {
        "rl": write(tmp_path / "rl.jsonl", [problem(words), problem(OTHER)], "rows"),
        "evaluation": write(tmp_path / "e.jsonl", [problem(words)], "rows"),
    }
    config = data(tmp_path / "in").model_copy(update=splits)
    assert build_dataset(config, PRETRAINED, 0, tmp_path / "out").num_overlapping == 0
    with pytest.raises(ConfigError, match="eval prompt occurs in train"):
        build_dataset(
            config.model_copy(update={"decontamination": None}), PRETRAINED, 0, tmp_path / "other"
        )


def rl(text: str, source: str = "made") -> RLRow:
    return RLRow(source, (Message("user", text),), "", RewardModel("rule", "1"))


@pytest.mark.parametrize(("num", "num_leaked"), [(7, 1), (8, 0)])
def test_words_of_all_prompts_of_a_source_are_a_template(num: int, num_leaked: int) -> None:
    instruction = "Let us think step by step and write the last number after four number signs."
    held_out = [rl(f"A number {place * 3} times. {instruction}") for place in range(num)]
    training = [rl(f"Quite another question. {instruction}", "other")]
    report = find_leaks(
        {"rl": training * 2 + [rl("free")]}, {"evaluation": held_out}, DecontaminationConfig()
    )
    assert report.num_leaked == {"rl": 2 * num_leaked}


def test_an_equal_problem_in_another_template_is_found() -> None:
    instructed = [rl(f"{place} and {place}. Answer briefly, please.") for place in range(9)]
    report = find_leaks(
        {"rl": [rl("4 and 4", "bare"), rl("4 and 5", "bare")]},
        {"evaluation": instructed},
        DecontaminationConfig(),
    )
    assert report.leaks == (Leak("rl", 0, "exact", "4 and 4", "evaluation", 4, 1),)


def conversation(*said: str) -> SFTRow:
    roles = ("user", "assistant")
    return SFTRow(tuple(Message(roles[n % 2], text) for n, text in enumerate(said)))


CAPITALS = ("France", "Italy", "Chad", "Peru", "Ghana", "Nepal", "Chile", "Laos", "Oman")


def test_whole_prompt_leaks_but_a_bare_answer_does_not() -> None:
    asked = [rl(f"What is the capital of {country}?") for country in CAPITALS]
    training = [
        conversation("what is the capital of   france", "Paris"),
        conversation("Who won the cup?", "France"),
        conversation("Which land is hexagonal?", "It is a riddle.", "No.", "France!"),
        conversation("Hello.", "Hi.", "What is the capital of Peru?", "Lima"),
    ]
    report = find_leaks({"sft": training}, {"evaluation": asked}, DecontaminationConfig())
    assert report.leaks == (
        Leak("sft", 0, "exact", "what is the capital of france", "evaluation", 0, 1),
        Leak("sft", 3, "exact", "what is the capital of peru", "evaluation", 3, 1),
    )


def test_a_template_of_the_training_rows_hides_no_equal_prompt() -> None:
    """Alone, the held-out prompt has no template; in training it is one of ten."""
    training = [rl(f"What is the capital of {country}?") for country in CAPITALS]
    report = find_leaks(
        {"rl": training}, {"evaluation": [rl("What is the capital of Chad?", "bench")]},
        DecontaminationConfig(),
    )  # fmt: skip
    assert [(leak.row, leak.kind) for leak in report.leaks] == [(2, "exact")]


def test_an_answer_that_is_a_whole_prompt_is_a_leak() -> None:
    report = find_leaks(
        {"sft": [conversation("Make a problem.", f"{HELD_OUT}"), conversation("a", "b")]},
        {"evaluation": [rl(HELD_OUT)]},
        DecontaminationConfig(),
    )
    assert [(leak.row, leak.kind) for leak in report.leaks] == [(0, "exact")]


def test_template_only_prompt_matches_only_an_identical_prompt() -> None:
    begins = "Write down every step of your way to the answer of this problem"
    held_out = [rl(begins), *(rl(f"{begins} {place} + {place}") for place in range(9))]
    training = [rl(f"{begins} seven hens", "a"), rl("free", "a"), rl(begins, "a")]
    report = find_leaks({"rl": training}, {"evaluation": held_out}, DecontaminationConfig())
    assert [(leak.row, leak.kind, leak.evaluation_row) for leak in report.leaks] == [
        (2, "exact", 0)
    ]


def test_short_problem_is_found_inside_text_with_its_template() -> None:
    asked = "Answer the following question in one word please: what is the capital of"
    held_out = [rl(f"{asked} {country}?") for country in CAPITALS]
    training = [
        conversation("Make me a quiz.", f"Here you are. {asked} Chad? Good luck!"),
        conversation("Make me a quiz.", f"Here you are. {asked} Mali? Good luck!"),
        conversation("What do you know of Chad?", "It is a land."),
    ]
    report = find_leaks({"sft": training}, {"evaluation": held_out}, DecontaminationConfig())
    assert [(leak.row, leak.kind, leak.evaluation_row) for leak in report.leaks] == [(0, "run", 2)]


def test_the_problems_of_suites_are_held_out_too(tmp_path: Path) -> None:
    suites = {"suites.hard.data": (rl("s0"),)}
    build_dataset(data(tmp_path / "in"), PRETRAINED, 0, tmp_path / "out", None, suites)
    dataset = load_dataset(tmp_path / "out")
    assert [row.prompt[0].content for row in dataset.sft_rows()] == [OTHER]
    report = json.loads((tmp_path / "out/decontamination.json").read_text(encoding="utf-8"))
    assert ("sft", 0, "suites.hard.data", 0) in [
        (each["split"], each["row"], each["evaluation_split"], each["evaluation_row"])
        for each in report["leaks"]
    ]
    plain = data(tmp_path / "in", decontamination=None, allow_overlap=False)
    suites = {"suites.hard.data": (rl("e7"), rl(f" {OTHER}\n"))}
    with pytest.raises(ConfigError) as caught:
        build_dataset(plain, PRETRAINED, 0, tmp_path / "plain", None, suites)
    assert str(caught.value).startswith("suites.hard.data: 1 eval prompt occurs in train (first: ")


def test_prompts_leak_only_from_min_words_on() -> None:
    training = {"sft": [SFTRow((Message("user", "q"), Message("assistant", "so a b c d e f.")))]}
    training["sft"].append(SFTRow((Message("user", "q"), Message("assistant", "no"))))
    for min_words, num_leaked in ((4, 1), (5, 1), (6, 0)):
        report = find_leaks(
            training, {"evaluation": [rl("b c d e f")]}, DecontaminationConfig(min_words=min_words)
        )
        assert report.num_leaked == {"sft": num_leaked}


def test_a_system_message_is_no_leak() -> None:
    def asked(question: str) -> RLRow:
        messages = (Message("system", HELD_OUT), Message("user", question))
        return RLRow("made", messages, "", RewardModel("rule", "1"))

    report = find_leaks(
        {"rl": [asked("one")]}, {"evaluation": [asked("two")]}, DecontaminationConfig()
    )
    assert report.leaks == ()


def test_a_section_without_held_out_rows_is_refused() -> None:
    source = SourceConfig(path="rl.jsonl")
    with pytest.raises(ValidationError, match="decontamination: got a section and no held-out"):
        DataConfig(rl=(source,), decontamination=DecontaminationConfig())
    DataConfig(arithmetic=ArithmeticConfig(), decontamination=DecontaminationConfig())
