"""Recorded decode steps on one device: the same samples, fewer launches, memory given back.

The CPU half replays with `RecordingCPU`, which compares each launch with its recording.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rlhf.testing.recorded_work import RecordingCPU
from rlhf.testing.rollout_calls import generate_all, send_weights
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from engines.config.rollout import RolloutConfig
from engines.rollout.transformers.engine import TransformersEngine
from engines.types import Completion, RolloutRequest, SamplingParams
from hardware.base import GraphCapture, PlatformBase
from hardware.nvidia import NvidiaPlatform

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
NUM_STEPS = 200


class SameSizes(NvidiaPlatform):
    """Runs padded sizes kernel by kernel."""

    def graph_capture(self, device: torch.device) -> GraphCapture:
        return lambda work: work


class SameSizesOnCPU(RecordingCPU):
    """See `SameSizes`."""

    def graph_capture(self, device: torch.device) -> GraphCapture:
        return lambda work: work


def recording(platform: PlatformBase) -> PlatformBase:
    return RecordingCPU() if platform.device_name == "cpu" else platform


def serving(
    model_dir: Path, platform: PlatformBase, dtype: str = "float32", **options: object
) -> TransformersEngine:
    rollout = RolloutConfig(max_num_sequences=24, timeout_s=120.0, options=options)
    engine = TransformersEngine(model_dir, rollout, dtype, platform)
    send(engine, model_dir, 0, dtype)
    return engine


def send(engine: TransformersEngine, model_dir: Path, version: int, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    send_weights(engine, model.named_parameters(), version, dtype)


def requests(max_new_tokens: int = 60) -> list[RolloutRequest]:
    """Forty samples in 24 rows, of different lengths and distributions."""
    return [
        RolloutRequest(
            f"prompt={index}",
            tuple(range(4, 8 + 9 * index)),
            SamplingParams(
                max_new_tokens - 5 * index,
                temperature=0.0 if index == 1 else 1.0,
                top_k=20 if index == 2 else 0,
            ),
            tuple(range(100 * index, 100 * index + 8)),
        )
        for index in range(5)
    ]


def said(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in completions]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_computes_what_its_kernels_do(
    platform: PlatformBase, model_dir: Path, dtype: str
) -> None:
    same = SameSizesOnCPU() if platform.device_name == "cpu" else SameSizes()
    expected = generate_all(serving(model_dir, same, dtype), requests())
    engine = serving(model_dir, recording(platform), dtype)
    for _ in range(2):
        assert said(generate_all(engine, requests())) == said(expected)


def test_recorded_steps_sample_the_tokens_of_eager_ones(
    platform: PlatformBase, model_dir: Path
) -> None:
    eager = serving(model_dir, platform, enforce_eager=True)
    found = generate_all(serving(model_dir, recording(platform)), requests())
    expected = generate_all(eager, requests())
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]


def num_launches(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(event.name.startswith(LAUNCHES) for event in found.events())


def test_most_steps_are_one_launch(platform: PlatformBase, model_dir: Path) -> None:
    # Greedy: no end-of-sequence token comes, so that every sample has all steps.
    asked = [RolloutRequest("p", (5, 6, 7), SamplingParams(NUM_STEPS, temperature=0.0), (0,) * 8)]
    chosen = recording(platform)
    engine = serving(model_dir, chosen)
    if isinstance(chosen, RecordingCPU):
        num_steps = max(len(c.token_ids) for c in generate_all(engine, asked)) - 1
        assert num_steps > 50
        assert chosen.num_launches > 0.8 * num_steps
        return
    eager = serving(model_dir, platform, enforce_eager=True)
    counts = []
    for each in (engine, eager):
        generate_all(each, asked)  # the first call prepares libraries
        counts.append(num_launches(lambda each=each: generate_all(each, asked)))
    assert counts[0] < counts[1] / 3


def test_sleep_gives_the_memory_of_recordings_back(platform: PlatformBase, model_dir: Path) -> None:
    chosen = recording(platform)
    engine = serving(model_dir, chosen)
    reserved = []
    for version in (1, 2, 3):
        generate_all(engine, requests())
        asyncio.run(engine.sleep())
        if isinstance(chosen, RecordingCPU):
            assert chosen.num_held == 0
        else:
            reserved.append(torch.cuda.memory_reserved())
        asyncio.run(engine.wake_up())
        send(engine, model_dir, version, "float32")
    assert max(reserved[1:], default=0) <= max(reserved[:1], default=0)
