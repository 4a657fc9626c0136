"""Detection of the platform, and what it says about its device."""

import pytest
import torch

from hardware.base import PlatformBase
from hardware.registry import detect
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
        with pytest.raises(ConfigError, match="nvidia asked, not available"):
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
    from engines.training import collectives

    collectives.init_single_process_group(platform, timeout_s=60.0)
    value = torch.arange(4.0, device=platform.device())
    collectives.all_reduce_sum(value)
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert collectives.gather_rows([1.0, 2.0], platform.device()) == [[1.0, 2.0]]
