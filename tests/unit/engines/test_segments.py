"""Segments: runs of versions, equality, and what a token costs."""

import gc
import pickle
import sys
from dataclasses import replace
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.config.algorithm import FilterGroupsConfig
from engines.requests import Segment
from engines.trainers.experience import MIN_SHARED_TOKENS, Collector
from engines.trainers.packing import pack
from engines.trainers.scoring import ScoredBatch, ScoredSample
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest, SamplingParams

NUM_TOKENS = 8192


@given(st.lists(st.integers(0, 2)))
def test_versions_are_kept_by_their_runs(versions: list[int]) -> None:
    segment = Segment.sampled(versions, [0.0] * len(versions), versions)
    assert segment.versions_N.tolist() == versions
    runs = segment.version_runs
    assert all(first[0] != second[0] for first, second in zip(runs, runs[1:], strict=False))


def test_segments_are_equal_where_all_their_values_are() -> None:
    segment = Segment.sampled([1, 2], [-0.5, float("nan")], [3, 3])
    assert segment == Segment.sampled([1, 2], [-0.5, float("nan")], [3, 3])
    assert segment != Segment.sampled([1, 3], [-0.5, float("nan")], [3, 3])
    assert segment != replace(segment, reward=1.0)
    one, same, other = (
        replace(segment, columns={"reward": np.array([1, last], np.float32)}) for last in (2, 2, 3)
    )
    assert one == same
    assert one != other
    assert one != segment
    assert segment != "segment"


@pytest.mark.parametrize("num_versions", [1, 4])
def test_a_token_costs_nine_bytes_on_the_wire(num_versions: int) -> None:
    """Eight, and what an answer is whatever its length."""
    versions = np.arange(NUM_TOKENS) * num_versions // NUM_TOKENS
    answer = Completion(
        "round=1/step=3/prompt=17", 3, np.arange(NUM_TOKENS), np.zeros(NUM_TOKENS), versions, "stop"
    )
    assert len(pickle.dumps(answer, protocol=5)) <= 9 * NUM_TOKENS


def test_tokens_are_no_python_objects_from_answer_to_batch() -> None:
    num_samples, tokens = 16, np.arange(NUM_TOKENS, dtype=np.int32)
    request = RolloutRequest("prompt=0", tuple(range(4)), SamplingParams(9), (0,) * num_samples)
    before = sys.getallocatedblocks()
    prompt = Prompt.of(request)
    answers = [
        Completion(request.request_id, sample, tokens + 1, tokens * -0.5, tokens * 0, "stop")
        for sample in range(num_samples)
    ]
    batch = pack([Trajectory.of(prompt, answer) for answer in answers])
    assert sys.getallocatedblocks() - before < NUM_TOKENS
    assert batch.num_tokens == num_samples * (NUM_TOKENS + 4)


def held_bytes(*roots: object) -> int:
    """Bytes of the arrays and tensors that can be reached, each block of memory once."""
    blocks: dict[int, int] = {}
    seen, open_ones = set(), list(roots)
    while open_ones:
        value = open_ones.pop()
        # From a function one reaches its module, and everything else.
        if id(value) in seen or isinstance(value, type | FunctionType | ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, np.ndarray):
            whole = value
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            blocks[whole.__array_interface__["data"][0]] = whole.nbytes
        else:
            open_ones.extend(gc.get_referents(value))
    return sum(blocks.values())


def test_a_driver_holds_a_token_of_a_step_once_in_nine_bytes() -> None:
    prompt = Prompt("prompt=0", np.arange(4, dtype=np.int32))
    samples = tuple(
        ScoredSample(0, Trajectory(prompt, index, (answer,), "stop"), 1.0, 1.0)
        for index in range(MIN_SHARED_TOKENS // NUM_TOKENS)
        for answer in [Segment.sampled(np.arange(NUM_TOKENS), np.zeros(NUM_TOKENS), [])]
    )
    collector = Collector(1, FilterGroupsConfig())
    collector.add(ScoredBatch(samples, len(samples), 0, 0))
    num_tokens = len(samples) * NUM_TOKENS
    assert held_bytes(collector) >= 8 * num_tokens
    experience = collector.experience()
    del samples
    assert held_bytes(collector, experience) <= 9.01 * num_tokens
    assert all(sample.trajectory.token_ids[9] == 9 for sample in collector.scored().samples)
