"""What a job does before it computes."""

import gc
import os
from platform import machine

import pytest
import torch

from engines.config.training import HardwareConfig
from engines.jobs.process import torch_setup
from engines.jobs.process.torch_setup import prepare_torch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError


def test_threads_and_collections() -> None:
    num_threads = torch.get_num_threads()
    gc.unfreeze()
    try:
        said: list[str] = []
        prepare_torch(HardwareConfig(platform="cpu"), 1, said.append)
        assert said[0].startswith("platform cpu: asked for by hardware.platform; ")
        assert said[0].endswith("; 1 threads")
        assert torch.get_num_threads() == 1
        # What is imported by now is most of what a process ever holds.
        assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    finally:
        torch.set_num_threads(num_threads)
        gc.unfreeze()


def test_another_device_than_the_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = HardwareConfig(platform="cpu", device_kind=machine())
    prepare_torch(planned, torch.get_num_threads(), lambda _: None)
    other = HardwareConfig(platform="cpu", device_kind="vax")
    with pytest.raises(ConfigError) as caught:
        prepare_torch(other, 1, lambda _: None)
    assert str(caught.value) == (
        f"hardware.device_kind: got cpu ({machine()}) where cpu (vax) was planned; run on that, or "
        "set hardware.platform and hardware.device_kind to this and run again"
    )
    # A head without the ranks' device directs them all the same.
    prepare_torch(other, torch.get_num_threads(), lambda _: None, computes=False)
    monkeypatch.setenv("RLHF_PLATFORM", "huawei")  # on the job's machine alone
    with pytest.raises(ConfigError, match="huawei was asked for and is not available"):
        prepare_torch(planned, 1, lambda _: None)


class Chip(CPUPlatform):
    """A device whose ranks need variables."""

    def training_env_vars(self, library: str) -> dict[str, str]:
        return {"CHIP_MEMORY": "grows", "CHIP_LIBRARY": library}

    def device_label(self) -> str:
        assert os.environ.get("CHIP_LIBRARY") in {"megatron", None}
        self.was_opened_with = os.environ.get("CHIP_LIBRARY")
        return super().device_label()


def test_a_driver_that_trains_sets_them_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip()
    chip.name = "cpu"
    monkeypatch.setattr(torch_setup, "detect", lambda name: (chip, ""))
    monkeypatch.setenv("CHIP_MEMORY", "as the user says")
    monkeypatch.setenv("CHIP_LIBRARY", "x")
    monkeypatch.delenv("CHIP_LIBRARY")  # so that it is removed in the end
    hardware = HardwareConfig(platform="cpu", device_kind=machine())
    num_threads = torch.get_num_threads()
    prepare_torch(hardware, num_threads, lambda _: None)
    assert chip.was_opened_with is None, "it only samples"
    prepare_torch(hardware, num_threads, lambda _: None, trains_with="megatron")
    assert chip.was_opened_with == "megatron"
    assert os.environ["CHIP_MEMORY"] == "as the user says"
