"""The contract of a platform: `pytest tests/contracts/test_platform.py --platform NAME`."""

from contextlib import AbstractContextManager

import pytest
import torch

from hardware.base import PlatformBase
from hardware.detection import availability, create

RAY_OPTIONS = {"num_cpus", "num_gpus", "resources"}


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> PlatformBase:
    """The named platform, on this machine."""
    name = request.config.getoption("--platform", "cpu")
    create(name)  # an unknown name, or a plugin that does not load, is no reason to skip
    found = availability(name)
    if not found.ok:
        pytest.skip(f"needs a machine with {name}: {found.reason}")
    return create(name)


def test_names(platform: PlatformBase) -> None:
    for value in (platform.device_name, platform.vendor_name, platform.ray_resource):
        assert isinstance(value, str)
        assert value
    platform.device()  # a vendor's collectives are known once its package is loaded
    assert platform.communication_backend in torch.distributed.Backend.backend_list
    assert platform.visible_devices_env is None or platform.visible_devices_env.isupper()
    assert platform.supports_ipc == (type(platform).ipc_memory is not PlatformBase.ipc_memory)


def test_a_probe_answers_in_one_line_and_again(platform: PlatformBase) -> None:
    found = platform.is_available()
    assert found.ok
    assert found.reason
    assert "\n" not in found.reason
    assert platform.is_available() == found


def test_tensors_can_be_made(platform: PlatformBase) -> None:
    assert platform.device_count() >= 1
    platform.set_device(0)
    assert platform.device().type == platform.device_name
    x = torch.ones(4, device=platform.device()) * 2
    platform.synchronize()
    assert float(x.sum()) == 8.0


def test_the_device_has_a_name_and_perhaps_more(platform: PlatformBase) -> None:
    assert platform.device_label().strip()
    uuid = platform.device_uuid()
    assert uuid is None or (uuid and uuid == platform.device_uuid())
    for dtype in ("bfloat16", "float16", "float32"):
        peak = platform.peak_flops_per_s(dtype)
        # Between a phone and a rack: a figure in TFLOP/s instead of FLOP/s falls outside.
        assert peak is None or 1e11 < peak < 1e17
    assert platform.peak_flops_per_s("no such dtype") is None


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
    platform.manual_seed(4)
    other = draw()
    assert all(torch.equal(a, b) for a, b in zip(second, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(t.dtype == torch.uint8 and t.device.type == "cpu" for t in state.values())


def test_a_state_of_another_platform_is_ignored(platform: PlatformBase) -> None:
    platform.manual_seed(3)
    state = {name: tensor.clone() for name, tensor in platform.rng_state().items()}
    platform.set_rng_state({**state, "some other device": torch.zeros(3, dtype=torch.uint8)})
    now = platform.rng_state()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[name], state[name]) for name in state)


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
    assert set(options) <= RAY_OPTIONS
    if "resources" in options:
        assert options["resources"] == {platform.ray_resource: 2}
    assert all(isinstance(v, str) for v in platform.rollout_env_vars().values())
    for library in ("fsdp2", "megatron"):
        assert all(isinstance(v, str) for v in platform.training_env_vars(library).values())


def test_copies_beside_the_computation_arrive_in_order(platform: PlatformBase) -> None:
    inbound, outbound = platform.copy_stream(), platform.copy_stream()
    assert (inbound is None) is (platform.device().type == "cpu"), "the host has one memory"
    if inbound is None or outbound is None:
        return
    host = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    back = torch.empty_like(host, pin_memory=True)
    for _ in range(8):
        arrived = torch.empty_like(host, device=platform.device())
        inbound.copy(host, arrived)
        inbound.join()
        outbound.copy(arrived * 2, back)  # computed after it arrived, dropped before it left
        del arrived
    outbound.synchronize()
    assert torch.equal(back, host * 2)


def test_ray_can_be_kept_from_hiding_devices(platform: PlatformBase) -> None:
    name = platform.ray_noset_env
    if name is not None:
        assert platform.visible_devices_env is not None, "Ray has nothing to write"
        assert name == f"RAY_EXPERIMENTAL_NOSET_{platform.visible_devices_env}"


def test_a_range_for_the_profiler(platform: PlatformBase) -> None:
    with platform.profiler_range("contract"):
        torch.ones(1, device=platform.device())
    with pytest.raises(ZeroDivisionError), platform.profiler_range("contract"):
        raise ZeroDivisionError


def test_an_ordinary_library_needs_no_scope(platform: PlatformBase) -> None:
    scope = platform.library_scope("a library that runs on every device")
    assert isinstance(scope, AbstractContextManager)
    with scope:
        pass
