"""Detection of the platform, and what it says about its device."""

import json
import subprocess
import sys

import pytest
import torch

from hardware.base import PlatformBase
from hardware.detection import detect
from infra.errors import ConfigError


def test_detection(platform: PlatformBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    name = "nvidia" if platform.device_name == "cuda" else "cpu"
    chosen, reason = detect(name)
    assert type(chosen) is type(platform)
    assert "asked for by" in reason
    probed, why = detect("auto")
    best = "nvidia" if torch.cuda.is_available() and torch.version.cuda else "cpu"
    assert why.startswith(f"{best}: ")
    assert probed.vendor_name == best
    if best == "cpu":
        with pytest.raises(ConfigError, match="nvidia was asked for and is not available"):
            detect("nvidia")


def test_device_and_memory(platform: PlatformBase) -> None:
    assert platform.device_count() >= 1
    platform.set_device(0)
    assert platform.device().type == platform.device_name
    before = platform.memory_allocated_bytes()
    held = torch.ones(64 << 20, dtype=torch.uint8, device=platform.device())
    platform.synchronize()
    if platform.device_name != "cpu":
        assert platform.memory_allocated_bytes() - before == held.numel()
    assert platform.max_memory_allocated_bytes() >= held.numel()
    del held
    platform.empty_cache()


def test_random_state_round_trip(platform: PlatformBase) -> None:
    platform.manual_seed(3)
    state = {name: tensor.clone() for name, tensor in platform.rng_state().items()}
    first = torch.rand(8, device=platform.device()), torch.rand(8)
    platform.set_rng_state(state)
    again = torch.rand(8, device=platform.device()), torch.rand(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    platform.manual_seed(3)
    assert torch.equal(torch.rand(8, device=platform.device()), first[0])


def test_collective_backend(platform: PlatformBase) -> None:
    from engines import collectives

    collectives.init_single_process_group(platform, timeout_s=60.0)
    value = torch.arange(4.0, device=platform.device())
    collectives.all_reduce(value)
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert collectives.gather_rows([1.0, 2.0], platform.device()) == [[1.0, 2.0]]


PROBE = """
import json
from hardware.detection import availability, names
answers = {name: availability(name).ok for name in names()}
import torch
print(json.dumps([answers, torch.cuda.is_initialized()]))
"""


def test_a_probe_opens_no_device(platform: PlatformBase) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True
    )
    answers, opened = json.loads(done.stdout.splitlines()[-1])
    assert answers[platform.vendor_name]
    assert not opened


def test_product_name_peak_and_uuid(platform: PlatformBase) -> None:
    label = platform.device_label()
    assert label
    if platform.device_name == "cpu":
        assert platform.device_uuid() is None
        return
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows = [[cell.strip() for cell in row.split(",")] for row in smi.stdout.splitlines()]
    uuid = platform.device_uuid()
    assert uuid is not None
    assert any(name == label and known.endswith(uuid) for name, known in rows)
    peak = platform.peak_flops_per_s("bfloat16")
    if peak is None:
        pytest.skip(f"needs a GPU whose peak is in hardware/nvidia.py; this is {label}")
    # A matrix product of 8192^3 keeps a good part of the peak busy, and cannot exceed it.
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=platform.device())
    starts, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeats in (3, 20):
        starts.record()
        for _ in range(repeats):
            a @ a
        ends.record()
        platform.synchronize()
    reached = 2 * 8192**3 * 20 / (starts.elapsed_time(ends) / 1e3)
    assert 0.4 * peak < reached < 1.02 * peak


def test_ranges_reach_the_profiler(platform: PlatformBase) -> None:
    with platform.profiler_range("outer"), platform.profiler_range("inner"):
        torch.ones(4, device=platform.device()).sum()
    platform.synchronize()
