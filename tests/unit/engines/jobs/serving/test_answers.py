"""Completions survive their file, and what they depend on is told from what judges them."""

import dataclasses
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.jobs.serving.answers import (
    SAMPLING_CODE,
    identity_values,
    read_answers,
    write_answers,
)
from engines.types import Completion, RolloutRequest, SamplingParams
from infra.store.canonical import sha256_json
from tasks.runner.run import numeric_sources

FLOATS = st.floats(max_value=0.0, allow_nan=False, width=32)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    size = draw(st.integers(0, 5))
    return Completion(
        request_id=draw(st.text(string.printable, max_size=8)),
        sample_index=draw(st.integers(0, 9)),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))),
        logprobs=tuple(draw(st.lists(FLOATS, min_size=size, max_size=size))),
        policy_versions=tuple(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
    )


@given(st.lists(st.lists(completions(), max_size=3), max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_what_is_written_is_read_to_the_last_bit(
    tmp_path: Path, answers: list[list[Completion]]
) -> None:
    write_answers(answers, tmp_path / "answers.parquet")
    assert read_answers(tmp_path / "answers.parquet") == [each for row in answers for each in row]


def test_images_count_by_their_bytes_and_text_alone_as_ever() -> None:
    text = RolloutRequest("r", (1, 2), SamplingParams(3), (4,))
    values = identity_values(text)
    assert "images" not in values
    assert {**dataclasses.asdict(text), "images": ()} == {**values, "images": ()}
    shown = [identity_values(dataclasses.replace(text, images=(data,))) for data in (b"a", b"b")]
    assert sha256_json(shown[0]) != sha256_json(shown[1]) != sha256_json(values)


@pytest.mark.parametrize("judging", ["engines.rewards", "engines.judges"])
def test_no_code_that_judges_is_reached_from_what_samples(judging: str) -> None:
    """Else an edit of a reward would have everything sampled again."""
    reached = numeric_sources(SAMPLING_CODE)
    assert {"engines.controller.launch", "engines.controller.replica"} <= reached.keys()
    assert not [module for module in reached if module.startswith(judging)]
