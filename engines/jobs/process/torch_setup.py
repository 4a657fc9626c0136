"""What every job that computes with torch does first: device, threads, garbage collector."""

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
    """Find the planned platform; set this process's CPU threads; spare it needless pauses.

    Args:
        hardware: that the stage was planned for.
        num_threads: of this process.
        say: told what computes, the processor's model too: that is recorded but does not count.
        computes: whether this process does; the machine of one that only directs others need
            not have their devices.

    Raises:
        ConfigError: the platform is not available, or the device is another one.
    """
    torch.set_num_threads(num_threads)
    reason = f"{hardware.platform}: where the ranks and the replicas run"
    if computes:
        platform, reason = detect(hardware.platform)
        check_planned(platform, hardware.platform, hardware.device_kind)
        platform.empty_cache()  # of a stage that this process ran before
    # What was imported lives as long as the process: a full collection, which may come in the
    # middle of any step, would look through its 400,000 objects (0.2 s) and free none.
    gc.freeze()
    say(f"platform {reason}; processor {processor()}; {num_threads} threads")
