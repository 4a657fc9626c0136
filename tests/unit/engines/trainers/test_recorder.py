"""Samples that are kept for people: whole, of the steps that were asked for, and of no weight."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.model import TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.trainers import recorder
from engines.trainers.recorder import token_texts
from infra.tracking.samples import KeptStep

Run = Callable[..., list[dict[str, float]]]
FILTERED = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}


def kept(directory: Path) -> dict[int, KeptStep]:
    files = sorted((directory / "samples").glob("*.json"))
    return {int(p.stem): KeptStep.model_validate_json(p.read_bytes()) for p in files}


def without_times(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """What two runs of one configuration have in common."""
    other = ("timing_s/", "perf/")
    return [{k: v for k, v in step.items() if not k.startswith(other)} for step in steps]


def test_a_step_keeps_its_first_samples_with_what_was_trained_on(
    run_round: Run, tmp_path: Path
) -> None:
    metrics = run_round("odd_length", keep_samples={"num_per_step": 6, "every_num_steps": 1})
    steps = kept(tmp_path)
    assert list(steps) == [1, 2]
    for step in steps.values():
        assert [sample.group for sample in step.samples] == [0, 0, 0, 0, 1, 1]
        for sample in step.samples:
            text = re.sub(r"<\|\w+\|>", "", "".join(sample.tokens))
            assert re.fullmatch(r"<\|user\|>(\d)\+\1=<\|assistant\|>", sample.prompt)
            assert len(sample.tokens) == len(sample.mismatch) == sample.num_tokens
            assert sample.finish_reason in {"stop", "length"}
            assert sample.score == sample.reward == len(text) % 2
        first_group = step.samples[:4]
        mean = sum(sample.score or 0 for sample in first_group) / 4
        for sample in first_group:
            above = (sample.score or 0) - mean
            assert (sample.advantage or 0) * above > 0 or sample.advantage == above == 0
    largest = max(abs(x) for s in steps[1].samples for x in s.mismatch if x is not None)
    assert largest <= metrics[0]["mismatch/logprob_abs_max"] + 1e-6


def test_mismatch_is_the_trainers_logprob_minus_the_samplers(
    run_round: Run, tmp_path: Path
) -> None:
    """A sampler that is cut to one token says a logprob of 0, and the trainer what it thinks."""
    greedy = {"max_new_tokens": 5, "top_k": 1}
    metrics = run_round(
        "odd_length",
        sampling=greedy,
        mismatch={"enable": False},
        keep_samples={"num_per_step": 16},
    )
    values = [x for s in kept(tmp_path)[1].samples for x in s.mismatch if x is not None]
    assert max(values) < 0
    mean = sum(map(abs, values)) / len(values)
    assert mean == pytest.approx(metrics[0]["mismatch/logprob_abs_mean"], rel=1e-4)


def test_steps_that_are_due_keep_samples_and_others_none(run_round: Run, tmp_path: Path) -> None:
    run_round("odd_length", num_steps_per_round=6, keep_samples={"every_num_steps": 4})
    assert list(kept(tmp_path)) == [1, 4, 6]


def test_keeping_changes_no_number(run_round: Run, tmp_path: Path) -> None:
    runs: list[list[dict[str, float]]] = []
    for number in (16, 0):
        (tmp_path / "journal.jsonl").unlink(missing_ok=True)
        if runs:
            (tmp_path / "checkpoints").rename(tmp_path / "checkpoints-before")
        runs.append(run_round("odd_length", keep_samples={"num_per_step": number}))
    assert len(kept(tmp_path)) == 2, "of the first run"
    assert without_times(runs[0]) == without_times(runs[1])


def test_a_step_that_trains_on_nothing_shows_why(run_round: Run, tmp_path: Path) -> None:
    run_round("always", num_steps_per_round=1, algorithm=FILTERED)
    (step,) = kept(tmp_path).values()
    assert {sample.score for sample in step.samples} == {1.0}
    assert {sample.advantage for sample in step.samples} == {None}
    assert all(sample.mismatch for sample in step.samples)


def test_a_disk_that_takes_no_samples_costs_them_alone(
    run_round: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "write_samples", full)
    assert len(run_round("odd_length")) == 2
    assert not kept(tmp_path)
    assert "samples of step 1 are not kept" in caplog.text


def test_of_a_long_answer_both_ends_are_kept(
    run_round: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_NUM_TOKENS", 2)
    run_round("odd_length")
    for sample in kept(tmp_path)[1].samples:
        assert len(sample.tokens) == len(sample.mismatch) == min(2, sample.num_tokens)


def test_a_sample_says_what_else_the_reward_reported(run_round: Run, tmp_path: Path) -> None:
    run_round("two_components")
    assert all({"acc", "digits"} <= set(s.extras) for s in kept(tmp_path)[1].samples)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> DirectoryTokenizer:
    """A few merges, so that most characters beyond ASCII are several tokens."""
    root = tmp_path_factory.mktemp("bytes")
    config = TokenizerConfig.model_validate({"kind": "bpe", "vocab_size": 300})
    texts = ["the cat sat on the mat", "1 + 1 = 2"]
    return DirectoryTokenizer.load(
        train_tokenizer(config, texts, root / "t", max_length=64, chat_template=None)
    )


@given(text=st.text(max_size=40))
def test_the_texts_of_tokens_are_the_text(byte_level: DirectoryTokenizer, text: str) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False)
    texts = token_texts(byte_level, token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == byte_level.decode(token_ids)
