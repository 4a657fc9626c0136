"""What every job that computes with torch does first: device, threads, garbage collector."""

import gc
import logging

import torch

from engines.config.stages import Runtime
from engines.config.training import TrainingConfig
from hardware.base import PlatformBase
from hardware.detection import detect
from infra import env

logger = logging.getLogger(__name__)


def prepare_torch(runtime: Runtime, training: TrainingConfig | None = None) -> PlatformBase:
    """Detect the platform and say why; set this process's CPU threads; spare it needless pauses.

    Threads, first that is set: `runtime.num_threads`, `training.num_threads`,
    RLHF_STAGE_THREADS, torch's own choice.

    Args:
        runtime: names the platform.
        training: of the stage, if it trains.

    Returns:
        The platform of this process.

    Raises:
        ConfigError: the platform asked for is not available.
    """
    platform, reason = detect(runtime.platform)
    num_threads = runtime.num_threads or (training.num_threads if training else None)
    num_threads = num_threads or env.RLHF_STAGE_THREADS.get_int()
    if num_threads:
        torch.set_num_threads(num_threads)
    # What was imported lives as long as the process: a full collection, which may come in the
    # middle of any step, would look through its 400,000 objects (0.2 s) and free none.
    gc.freeze()
    logger.info("platform %s; %d threads", reason, torch.get_num_threads())
    return platform
