"""Weight sync inside one process, by its fixed cost and its rate, and the checksum alone."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import torch
from gpu_figures import Figure, Goal, Setup
from gpu_training import policy_spec, seconds_of
from measure import Measurement
from safetensors.torch import load_file

from engines.checksum import TensorChecksums, method_on
from engines.controller.model_worker import ModelWorker

FIXED_GOAL, RATE_GOAL = Goal(0.1, at_most=True), Goal(100.0)


def sync_seconds(setup: Setup, hf_dir: Path) -> tuple[int, tuple[float, ...]]:
    """Bytes of a sync of a model, and the seconds of each, checksums of both sides included."""
    worker = ModelWorker(policy_spec(setup, hf_dir))
    platform, versions = setup.open_platform(), count()
    with closing(worker):
        worker.initialize()
        num_bytes = worker.sync_weights(next(versions)).sent.num_bytes
        found = [
            seconds_of(platform, lambda: worker.sync_weights(next(versions)))
            for _ in range(setup.num_repeats)
        ]
    platform.empty_cache()
    return num_bytes, tuple(found)


def weight_sync(setup: Setup) -> Iterator[Figure]:
    """Two models with equally many tensors: the small one's seconds are the fixed cost."""
    fixed_bytes, fixed = sync_seconds(setup, setup.narrow_hf_dir)
    yield Figure("weight_sync", "fixed cost", "s", Measurement(fixed), FIXED_GOAL)
    num_bytes, seconds = sync_seconds(setup, setup.hf_dir)
    size_gb = num_bytes / 1e9
    what = f"{size_gb:.3g} GB in process, both checksums"
    yield Figure(
        "weight_sync", what, "GB/s", Measurement(tuple(size_gb / each for each in seconds))
    )
    beyond_s = Measurement(seconds).median - Measurement(fixed).median
    if beyond_s > 0:
        rate = (num_bytes - fixed_bytes) / 1e9 / beyond_s
        yield Figure(
            "weight_sync", "beyond the fixed cost", "GB/s", Measurement((rate,)), RATE_GOAL
        )


def checksum(setup: Setup) -> Iterator[Figure]:
    """Every tensor of the model, in the dtype that is sent, where the trainer holds it."""
    platform = setup.open_platform()
    dtype = getattr(torch, setup.dtype)
    tensors = [
        tensor.to(platform.device(), dtype)
        for tensor in load_file(setup.hf_dir / "model.safetensors").values()
    ]
    size_gb = sum(tensor.nbytes for tensor in tensors) / 1e9

    def all_of_them() -> None:
        checksums = TensorChecksums(method_on(platform.device_name))
        for number, tensor in enumerate(tensors):
            checksums.add(str(number), tensor)
        assert len(checksums.by_name()) == len(tensors)

    found = [seconds_of(platform, all_of_them) for _ in range(setup.num_repeats + 1)][1:]
    rates = Measurement(tuple(size_gb / each for each in found))
    yield Figure("checksum", f"{len(tensors)} tensors, {size_gb:.3g} GB", "GB/s", rates)
