"""State of a training engine as files: tensors, scalars and random generators.

Promises: a load at the world size of the save continues bit for bit; at another world size
the weights, the optimizer and the schedule are restored, but not the random generators.
Layout: `tensors/shard-*.safetensors`, `rng/rank-<r>.safetensors`, `engine.json`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from engines import collectives
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.sharded import (
    Region,
    ShardedReader,
    load_sharded,
    save_regions,
    stage_regions,
    together,
)
from engines.checkpoint.tensor_files import read_tensors, write_tensors
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from hardware.base import PlatformBase
from infra.frozen_model import FrozenModel

ENGINE_FILE = "engine.json"
TENSORS_DIR = "tensors"
MODEL_PREFIX = "model."
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments."""
AVERAGE = "ema"
"""Name of a weight's moving average, next to its moments."""
_RNG_DIR = "rng"


class EngineScalars(FrozenModel):
    """The content of `engine.json`.

    Attributes:
        step: the trainer's step; `num_steps` counts the engine's optimizer steps.
        num_optimizer_steps: Adam's bias-correction count.
        backend: training backend that wrote the checkpoint.
        num_averaged: optimizer steps in the moving average; None if there is no average.
    """

    schema_version: int = 1
    step: int
    num_steps: int
    schedule_step: int
    num_optimizer_steps: int
    world_size: int
    backend: str
    lora: LoraConfig | None = None
    num_averaged: int | None = None


def save_engine_state(
    path: Path, regions: Iterable[Region], scalars: EngineScalars, platform: PlatformBase
) -> None:
    """Write this rank's part into an existing shared directory; every rank calls it.

    Regions are of tensors `model.<name>`, `optimizer.<moment>.<name>` and `optimizer.ema.<name>`.
    If a rank could not write, all raise `OSError`; a lone rank raises its own error.
    """
    save_regions(path / TENSORS_DIR, regions)

    def write(_: object) -> None:
        _write_small_files(path, scalars, platform.rng_state(), collectives.rank())

    # Also a barrier: no rank continues before all files exist.
    together(f"cannot save {path}", write)


def stage_engine_state(
    path: Path,
    regions: Iterable[Region],
    scalars: EngineScalars,
    platform: PlatformBase,
    buffers: StagingBuffers,
) -> Callable[[], None]:
    """Copy what `save_engine_state` writes to the host and return a function that writes it.

    Every rank calls it; the tensors may change afterwards. The returned function may run on any
    thread: it uses no collective, may raise `OSError`, and gives the buffers back after writing.
    """
    write_regions = stage_regions(path / TENSORS_DIR, regions, buffers)
    # Read now: the process group may be closed when the files are written.
    rng = {name: tensor.clone() for name, tensor in platform.rng_state().items()}
    rank = collectives.rank()

    def write() -> None:
        write_regions()
        _write_small_files(path, scalars, rng, rank)

    return write


def _write_small_files(
    path: Path, scalars: EngineScalars, rng: Mapping[str, Tensor], rank: int
) -> None:
    """Write this rank's random generators and, on rank 0, the scalars."""
    (path / _RNG_DIR).mkdir(exist_ok=True)
    write_tensors(rng, path / _RNG_DIR / f"rank-{rank:05d}.safetensors")
    if rank == 0:
        (path / ENGINE_FILE).write_text(
            json.dumps(scalars.model_dump(), indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


def load_engine_state(
    path: Path, tensors: Mapping[str, Tensor], lora: LoraConfig | None, platform: PlatformBase
) -> EngineScalars:
    """Fill an engine's tensors in place; random generators too if the world size is the same.

    Every rank calls it. Raises `CheckpointError` if the checkpoint is incomplete or does not fit.
    """
    scalars = read_scalars(path)
    if scalars.lora != lora:
        raise CheckpointError(
            f"{path} was trained with training.lora {_shown(scalars.lora)}; this engine has "
            f"{_shown(lora)}, so it can start from those weights but not continue the training"
        )
    try:
        load_sharded(path / TENSORS_DIR, tensors)
    except CheckpointError as error:
        if absent := _absent_parts(path, tensors):
            raise CheckpointError(
                f"{path}: part {', '.join(map(repr, absent))} is absent; a stage continues only "
                "from a complete checkpoint; begin the stage anew with --force, or export its "
                "weights and name them in model.path of a new run"
            ) from error
        raise
    if scalars.world_size == collectives.world_size():
        file = path / _RNG_DIR / f"rank-{collectives.rank():05d}.safetensors"
        if not file.exists():
            raise CheckpointError(f"{file} is absent")
        platform.set_rng_state(read_tensors(file))
    return scalars


def _absent_parts(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return which of model and optimizer have no tensor in a checkpoint; [] if it has no files."""
    if not any((path / TENSORS_DIR).glob("shard-*.safetensors")):
        return []
    there = ShardedReader(path / TENSORS_DIR).names()
    parts, held = ({name.partition(".")[0] for name in names} for names in (tensors, there))
    return sorted(parts - held)


def _shown(lora: LoraConfig | None) -> str:
    return "null" if lora is None else f"rank {lora.rank}, alpha {lora.alpha:g}"


def read_scalars(path: Path) -> EngineScalars:
    """Return `engine.json`; raise `CheckpointError` if it is absent or has another schema."""
    try:
        return EngineScalars.model_validate_json((path / ENGINE_FILE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not an engine checkpoint: no {ENGINE_FILE}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path / ENGINE_FILE}: {error}") from error
