"""Setup of a job that computes with torch: device, threads, garbage collector."""

import gc
from collections.abc import Callable

import torch

from engines.config.training import HardwareConfig
from hardware.detection import check_planned, detect, processor


def prepare_torch(
    hardware: HardwareConfig,
    num_threads: int,
    say: Callable[[str], None],
    *,
    computes: bool = True,
) -> None:
    """Find the planned platform, set CPU threads and freeze the garbage collector.

    `computes` is False for a driver whose machine needs no device; otherwise a ConfigError is
    raised if the planned platform or device is missing.
    """
    torch.set_num_threads(num_threads)
    reason = f"{hardware.platform}: where the ranks and the replicas run"
    if computes:
        platform, reason = detect(hardware.platform)
        check_planned(platform, hardware.platform, hardware.device_kind)
        platform.empty_cache()  # memory of a stage that this process ran before
    # A full collection would scan the 400,000 imported objects (0.2 s) in the middle of a step
    # and free none of them.
    gc.freeze()
    say(f"platform {reason}; processor {processor()}; {num_threads} threads")
