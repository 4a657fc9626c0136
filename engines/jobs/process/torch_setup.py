"""Setup of a job that computes with torch: device, threads, garbage collector."""

import gc
from collections.abc import Callable

import torch

from engines.config.training import HardwareConfig
from hardware.detection import check_planned, detect, processor
from infra import env


def prepare_torch(
    hardware: HardwareConfig,
    num_threads: int,
    say: Callable[[str], None],
    *,
    computes: bool = True,
    trains_with: str | None = None,
) -> None:
    """Find the planned platform, set CPU threads and freeze the garbage collector.

    `computes` is False for a driver whose machine needs no device; otherwise a ConfigError is
    raised if the planned platform or device is missing. `trains_with` is the backend of a driver
    that is a training rank itself.
    """
    torch.set_num_threads(num_threads)
    reason = f"{hardware.platform}: where the ranks and the replicas run"
    if computes:
        platform, reason = detect(hardware.platform)
        if trains_with is not None:  # before the device is opened
            env.set_for_platform(env.unset_of(platform.training_env_vars(trains_with)))
        check_planned(platform, hardware.platform, hardware.device_kind)
        platform.empty_cache()  # memory of a stage that this process ran before
    # A full collection would scan the 400,000 imported objects (0.2 s) in the middle of a step
    # and free none of them.
    gc.freeze()
    say(f"platform {reason}; processor {processor()}; {num_threads} threads")
