"""Preference pairs in the forms in which they are published."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engines.config.data import DataConfig, SourceConfig
from engines.config.model import ModelConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.sources import PREFERENCE_ROWS, create_preprocessor, first_usable_row
from engines.data.read.dataset import load_dataset
from engines.data.read.rows import Message, PreferenceRow, RewardModel, RowError
from infra.errors import ConfigError

ASKED = {"role": "user", "content": "2+2?"}
RANDOM = ModelConfig(init="random", max_length=32)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(columns: dict[str, Any], layout: str = "pairs", **options: Any) -> PreferenceRow:
    source = SourceConfig(format=layout, path="pairs.jsonl", options=options)
    return create_preprocessor(source, "data.preference.0").preference_row(columns)


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]},
        {"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]},
        # HuggingFaceH4/ultrafeedback_binarized repeats the question as text.
        {"prompt": "2+2?", "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]},
    ],
)
def test_the_forms_of_a_pair_are_one_row(columns: dict[str, Any]) -> None:
    assert read(columns) == PreferenceRow((Message("user", "2+2?"),), "4", "5")


def test_a_later_answer_of_a_longer_dialogue() -> None:
    dialogue = [ASKED, said("4"), {"role": "user", "content": "sure?"}]
    row = read({"chosen": [*dialogue, said("yes")], "rejected": [*dialogue, said("no")]})
    assert [message.role for message in row.prompt] == ["user", "assistant", "user"]
    assert (row.chosen, row.rejected) == ("yes", "no")
    chosen, rejected = row.conversations
    assert chosen[:-1] == rejected[:-1] == row.prompt


def test_margins_and_sources_from_their_columns() -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 8.5, "score_rejected": 6}
    names = ("score_chosen", "score_rejected")
    row = read(pair, score_columns=names, data_source="ultrafeedback")
    assert (row.margin, row.data_source) == (2.5, "ultrafeedback")
    assert read({**pair, "margin": 1, "data_source": "own"}).margin == 1.0
    assert read(pair).margin is None
    with pytest.raises(RowError, match="score_rejected is None; need a number"):
        read({**pair, "score_rejected": None}, score_columns=names)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": " a\n"}, "chosen and rejected are identical"),
        ({"chosen": "a", "rejected": "b"}, "prompt is null, and chosen is no conversation"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen is null"),
        (
            {"chosen": [ASKED, said("4")], "rejected": [{**ASKED, "content": "x"}, said("5")]},
            "chosen and rejected answer different prompts",
        ),
        (
            {"prompt": "x", "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]},
            "chosen answers another prompt than the column prompt",
        ),
        ({"chosen": [ASKED], "rejected": [ASKED]}, "chosen ends with the user's message"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, "margin is 'much'"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "margin is nan"),
    ],
)
def test_what_is_no_pair_is_refused(columns: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        read(columns)


def test_dialogues_of_hh_rlhf() -> None:
    before = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Name a\n\ncolour\n\nAssistant:"
    row = read({"chosen": f"{before} Red.", "rejected": f"{before} No!"}, "hh_rlhf")
    assert [message.content for message in row.prompt] == ["Hi", "Hello.", "Name a\n\ncolour"]
    assert (row.chosen, row.rejected) == ("Red.", "No!")
    assert row.data_source == "Anthropic/hh-rlhf"
    with pytest.raises(RowError, match="chosen does not begin with 'Human:'"):
        read({"chosen": "Hi", "rejected": "Ho"}, "hh_rlhf")
    other = before.replace("Hi", "Ho")
    with pytest.raises(RowError, match="different prompts"):
        read({"chosen": f"{before} Red.", "rejected": f"{other} Red."}, "hh_rlhf")


def test_scores_of_ultrafeedback() -> None:
    raw = {
        "prompt": "2+2?",
        "prompt_id": "f0e3",
        "chosen": [ASKED, said("4")],
        "rejected": [ASKED, said("5")],
        "messages": [ASKED, said("4")],
        "score_chosen": 8.5,
        "score_rejected": 6.0,
    }
    source = "HuggingFaceH4/ultrafeedback_binarized"
    expected = PreferenceRow((Message("user", "2+2?"),), "4", "5", source, 2.5)
    assert read(raw, "ultrafeedback") == expected
    assert read({**raw, "score_rejected": 8.5}, "ultrafeedback").margin == 0
    with pytest.raises(RowError, match=r"score_chosen is 8\.5; need at least score_rejected 9\.0"):
        read({**raw, "score_rejected": 9}, "ultrafeedback")
    with pytest.raises(RowError, match="score_chosen is None; need a number"):
        read({**raw, "score_chosen": None}, "ultrafeedback")


ANSWERS = (("chosen", "4"), ("rejected", "5"))


def pair(prompt: str, chosen: str = "1", rejected: str = "2") -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("layout", "raw"),
    [
        ("pairs", pair("2+2?", "4", "5")),
        ("hh_rlhf", {f"{kind}": f"Human: 2+2?\n\nAssistant: {text}" for kind, text in ANSWERS}),
        (
            "ultrafeedback",
            {
                **{kind: [ASKED, said(text)] for kind, text in ANSWERS},
                **{name: 1.0 for name in ("score_chosen", "score_rejected")},
                "prompt": "2+2?",
                "prompt_id": "f0e3",
            },
        ),
    ],
)
def test_a_model_judges_answers_to_the_prompts_of_pairs(
    layout: str, raw: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(raw) + "\n", encoding="utf-8")
    for name in (layout, "auto"):
        data = DataConfig(rl=(SourceConfig(path=str(path), format=name),))
        build_dataset(data, RANDOM, 0, tmp_path / name)
        (row,) = load_dataset(tmp_path / name).rl_rows()
        assert row.prompt == (Message("user", "2+2?"),)
        assert row.reward_model == RewardModel("model", None)


def pairs_file(path: Path, *rows: dict[str, Any]) -> tuple[SourceConfig, ...]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (SourceConfig(path=str(path), format="pairs"),)


def test_pairs_are_a_split_of_the_dataset(tmp_path: Path) -> None:
    long = "9" * 40
    data = DataConfig(
        preference=pairs_file(tmp_path / "p.jsonl", pair("3"), pair("4", rejected=long)),
        preference_evaluation=pairs_file(tmp_path / "e.jsonl", pair("5")),
        on_overlong="drop",
    )
    summary = build_dataset(data, RANDOM, 0, tmp_path / "out")
    dataset = load_dataset(tmp_path / "out")
    # The pair whose rejected answer is too long is gone, both halves of it.
    assert tuple(dataset.preference_rows()) == (PreferenceRow((Message("user", "3"),), "1", "2"),)
    assert [row.prompt[0].content for row in dataset.preference_evaluation_rows()] == ["5"]
    assert summary.preference is not None
    assert (summary.preference.num_rows, summary.preference.num_overlong) == (1, 1)
    assert dataset.summary()["preference_evaluation"]["num_rows"] == 1
    assert tuple(dataset.sft_rows()) == tuple(dataset.rl_rows()) == ()


def test_identical_answers_are_counted_and_named_by_their_line(tmp_path: Path) -> None:
    rows = [pair("3"), pair("4", "1", "1"), pair("5", "2", "2")]
    data = DataConfig(preference=pairs_file(tmp_path / "pairs.jsonl", *rows))
    with pytest.raises(ConfigError) as caught:
        build_dataset(data, RANDOM, 0, tmp_path / "out")
    assert str(caught.value) == (
        "pairs.jsonl:2: chosen and rejected are identical; nothing is preferred "
        "(2 such rows; set data.on_bad_row=drop to skip and count)"
    )
    kept = data.model_copy(update={"on_bad_row": "drop"})
    summary = build_dataset(kept, RANDOM, 0, tmp_path / "out")
    assert summary.preference is not None
    [report] = summary.preference.sources
    assert dict(report.num_bad) == {"chosen and rejected are identical; nothing is preferred": 2}


def test_a_held_out_pair_must_not_be_trained_on(tmp_path: Path) -> None:
    data = DataConfig(
        preference=pairs_file(tmp_path / "p.jsonl", pair("3"), pair("4")),
        preference_evaluation=pairs_file(tmp_path / "e.jsonl", pair("4", "7", "8")),
    )
    with pytest.raises(ConfigError) as caught:
        build_dataset(data, RANDOM, 0, tmp_path / "out")
    assert str(caught.value).startswith(
        "data.preference_evaluation: 1 eval prompt occurs in train (first: row 0 = preference row 1"
    )


def test_a_layout_without_pairs_is_refused_before_a_run(tmp_path: Path) -> None:
    [source] = pairs_file(tmp_path / "p.jsonl", pair("3"))
    assert first_usable_row(source, "data.preference.0", PREFERENCE_ROWS).chosen == "1"
    other = source.model_copy(update={"format": "rows"})
    with pytest.raises(ConfigError, match=r"^data.preference.0.format: this layout has no pairs"):
        first_usable_row(other, "data.preference.0", PREFERENCE_ROWS)


def test_hh_rlhf_as_its_hub_files_are(tmp_path: Path) -> None:
    asked = "\n\nHuman: 2+2?\n\nAssistant: "
    for folder in ("harmless-base", "helpful-base"):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            row = json.dumps({"chosen": f"{asked}4", "rejected": f"{asked}{folder} {split}"})
            (tmp_path / folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    source = SourceConfig(path=str(tmp_path), subset="helpful-base", split="test")
    row = first_usable_row(source, "data.preference.0", PREFERENCE_ROWS)
    assert (row.rejected, row.data_source) == ("helpful-base test", "Anthropic/hh-rlhf")
