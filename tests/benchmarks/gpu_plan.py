"""What `rlhf plan --on` says of a step of SFT, against what this device takes for it."""

import gc
import json
import random
from collections.abc import Iterator

import torch
from gpu_figures import Figure, Goal, NeedsError, Setup
from gpu_training import LR, draw_ids, policy_spec, seconds_of
from measure import Measurement

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.cost.machines import Machine, machine_like
from engines.cost.model_shape import ModelShape
from engines.cost.rank_bytes import train_bytes
from engines.cost.seconds import train_seconds
from engines.cost.workload import RoleCost, Workload
from engines.training.base import create_engine
from engines.types import TokenBatch
from hardware.base import PlatformBase

UNDER_GOAL, OVER_GOAL, TIME_GOAL = Goal(0.95), Goal(1.15, at_most=True), Goal(0.3, at_most=True)


def planned_step(setup: Setup, training: TrainingConfig) -> Workload:
    """A step of SFT on the rows of the shape, one rank."""
    config = json.loads((setup.hf_dir / "config.json").read_text(encoding="utf-8"))
    length = setup.shape.sequence_length
    return Workload(
        roles=(RoleCost("policy", ModelShape.from_config(config), num_trained=1),),
        training=training,
        num_sequences=setup.shape.num_sequences,
        sequence_tokens=length,
        unit_tokens=length,
    )


def this_machine(platform: PlatformBase) -> Machine:
    """The device of this process; of an unknown product the rates are those of an H100.

    Raises:
        NeedsError: it is a CPU.
    """
    if platform.device_name == "cpu":
        raise NeedsError("a GPU: the plan has no rates of CPUs")
    _, num_bytes = torch.get_device_module(platform.device()).mem_get_info()
    return machine_like(platform.name, platform.device_label(), num_bytes, 1)


def full_rows(setup: Setup) -> TokenBatch:
    """The batch of the shape."""
    draw, shape = random.Random(0), setup.shape
    rows = [
        list(draw_ids(draw, shape.vocab_size, shape.sequence_length))
        for _ in range(shape.num_sequences)
    ]
    mask = [[0.0] + [1.0] * (shape.sequence_length - 1)] * shape.num_sequences
    return TokenBatch.from_sequences(rows, loss_mask=mask)


def measured_step(
    setup: Setup, training: TrainingConfig, platform: PlatformBase, batch: TokenBatch
) -> tuple[int, tuple[float, ...]]:
    """Largest number of bytes in tensors during a step, and the seconds of each step."""
    engine = create_engine(
        "language_model", setup.hf_dir, training, OptimizerConfig(lr=LR), 100, platform, seed=0
    )
    engine.initialize()
    engine.train_batch(batch, SupervisedLoss())  # makes moments, loads kernels
    module = torch.get_device_module(platform.device())
    module.reset_peak_memory_stats()
    seconds = tuple(
        seconds_of(platform, lambda: engine.train_batch(batch, SupervisedLoss()))
        for _ in range(setup.num_repeats)
    )
    return module.max_memory_allocated(), seconds


def plan(setup: Setup) -> Iterator[Figure]:
    """Memory of tensors at the peak and seconds of a step, with and without recomputation."""
    platform = setup.open_platform()
    machine, batch = this_machine(platform), full_rows(setup)
    for recomputes in (True, False):
        training = policy_spec(setup, setup.hf_dir, gradient_checkpointing=recomputes).training
        work = planned_step(setup, training)
        peak_bytes, seconds = measured_step(setup, training, platform, batch)
        gc.collect()
        platform.empty_cache()
        name = "recomputation" if recomputes else "no recomputation"
        ratio = Measurement((train_bytes(work).total_bytes / peak_bytes,))
        planned_s = train_seconds(work, machine)
        yield Figure("plan", f"{name}: measured peak", "GB", Measurement((peak_bytes / 1e9,)))
        yield Figure("plan", f"{name}: planned over measured memory", "", ratio, UNDER_GOAL)
        yield Figure("plan", f"{name}: the same, from above", "", ratio, OVER_GOAL)
        off = Measurement(tuple(abs(planned_s / each - 1) for each in seconds))
        yield Figure("plan", f"{name}: planned seconds differ by", "%", off, TIME_GOAL)
