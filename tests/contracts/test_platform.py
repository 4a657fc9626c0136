"""The contract of a platform: `pytest tests/contracts/test_platform.py --platform NAME`."""

import pytest
import torch

from hardware.base import PlatformBase
from hardware.registry import built_in_registry


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> PlatformBase:
    """The named platform, on this machine."""
    name = request.config.getoption("--platform", "cpu")
    registry = built_in_registry()
    found = registry.availability(name)
    if not found.ok:
        pytest.skip(f"needs a machine with {name}: {found.reason}")
    return registry.create(name)


def test_names(platform: PlatformBase) -> None:
    for value in (platform.device_name, platform.vendor_name, platform.ray_resource):
        assert isinstance(value, str)
        assert value
    assert platform.communication_backend in torch.distributed.Backend.backend_list
    assert isinstance(getattr(torch, platform.default_dtype), torch.dtype)
    assert platform.visible_devices_env is None or platform.visible_devices_env.isupper()
    assert isinstance(platform.supports_ipc, bool)


def test_tensors_can_be_made(platform: PlatformBase) -> None:
    assert platform.device_count() >= 1
    platform.set_device(0)
    assert platform.device().type == platform.device_name
    x = torch.ones(4, device=platform.device()) * 2
    platform.synchronize()
    assert float(x.sum()) == 8.0


def test_seeds_repeat_and_states_restore(platform: PlatformBase) -> None:
    device = platform.device()

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(5), torch.rand(5, device=device)

    platform.manual_seed(3)
    first = draw()
    state = {name: tensor.clone() for name, tensor in platform.rng_state().items()}
    second = draw()
    platform.set_rng_state(state)
    again = draw()
    platform.manual_seed(3)
    repeated = draw()
    assert all(torch.equal(a, b) for a, b in zip(second, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert all(t.dtype == torch.uint8 and t.device.type == "cpu" for t in state.values())


def test_memory_grows_with_a_tensor(platform: PlatformBase) -> None:
    before = platform.memory_allocated_bytes()
    block = torch.full((64 << 20,), 1, dtype=torch.uint8, device=platform.device())
    assert platform.memory_allocated_bytes() >= before + (32 << 20)
    assert platform.max_memory_allocated_bytes() >= platform.memory_allocated_bytes() * 0.95
    del block
    platform.empty_cache()


def test_options_for_other_processes(platform: PlatformBase) -> None:
    options = platform.ray_resource_options(2)
    assert options
    assert set(options) <= {"num_cpus", "num_gpus", "resources"}
    assert all(isinstance(v, str) for v in platform.rollout_env_vars().values())
    with platform.profiler_range("contract"):
        pass
