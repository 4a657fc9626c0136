"""FlashAttention 3 is activated in torch's own registry, where it fits and loads; else nothing is.

The module with its kernels is a stand-in on the path, which registers operators of the names that
torch looks for. What torch does with it is torch's own code.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import attention

from hardware import nvidia
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform
from hardware.nvidia import NvidiaPlatform, attention_implementation

KERNELS = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    if not hasattr(torch.ops.flash_attn_3, name):
        library.define(name + "(Tensor q) -> Tensor")
"""


class Device(NvidiaPlatform):
    """An NVIDIA platform whose device has a stated compute capability."""

    def __init__(self, major: int) -> None:
        self.major = major

    @property
    def device_module(self) -> Any:
        return SimpleNamespace(get_device_capability=lambda: (self.major, 0))


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """Each test begins and ends with torch's own kernels."""
    assert attention.current_flash_attention_impl() is None
    yield
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, module: str, source: str) -> None:
    """Put a stand-in of the module of kernels on the path, under a name of its own."""
    (directory / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(nvidia, "FA3_MODULE", module)


def test_it_is_for_hopper_where_torch_and_the_package_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert attention_implementation(9, ["FA3", "FA4"]) is None, "no package"
    install(monkeypatch, tmp_path, "kernels_of_hopper", "")
    assert attention_implementation(9, ["FA3", "FA4"]) == "FA3"
    assert attention_implementation(9, []) is None, "a torch without it"
    assert [attention_implementation(major, ["FA3", "FA4"]) for major in (8, 10, 12)] == [None] * 3


def test_torch_takes_the_installed_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, nvidia.FA3_MODULE, KERNELS)
    assert Device(8).choose_attention() == "FlashAttention 2"
    assert attention.current_flash_attention_impl() is None
    device = Device(9)
    assert device.choose_attention() == "FlashAttention 3"
    assert attention.current_flash_attention_impl() == "FA3"

    def again(name: str) -> None:
        raise AssertionError(f"{name} is active already")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", again)
    assert device.choose_attention() == "FlashAttention 3"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("raise RuntimeError('no kernels')", "RuntimeError: no kernels"),
    ],
    ids=["ImportError", "OSError", "RuntimeError"],
)
def test_kernels_that_do_not_load_leave_torchs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, reason: str
) -> None:
    def activate(name: str) -> None:
        exec(error)

    install(monkeypatch, tmp_path, "kernels_that_break", "")
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    expected = f"FlashAttention 2 (kernels_that_break does not load: {reason})"
    assert Device(9).choose_attention() == expected
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("platform", [CPUPlatform()])
def test_nothing_is_activated_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: PlatformBase
) -> None:
    install(monkeypatch, tmp_path, "kernels_for_a_cpu", "raise AssertionError('imported')")
    assert platform.choose_attention() == "torch's own kernels"
    assert attention.current_flash_attention_impl() is None
