"""What a training engine is at one moment, as files: tensors, scalars, random generators.

Promises: `load` after `save` at the same world size continues bit for bit; at another world size
the weights, the optimizer and the schedule are the same, and random generators stay as they
are. Scalars are JSON, everything else safetensors.
Layout: `tensors/shard-*.safetensors`, `rng/rank-<r>.safetensors`, `engine.json`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from engines import collectives
from engines.checkpoint.sharded import load_sharded, save_sharded, stage_sharded
from engines.checkpoint.staging import StagingBuffers
from engines.checkpoint.tensor_files import read_tensors, write_tensors
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from hardware.base import PlatformBase
from infra.frozen_model import FrozenModel

ENGINE_FILE = "engine.json"
TENSORS_DIR = "tensors"
MODEL_PREFIX = "model."
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of Adam."""
AVERAGE = "ema"
"""What the moving average of a weight is called beside its moments."""
_RNG_DIR = "rng"


class EngineScalars(FrozenModel):
    """The content of `engine.json`.

    Attributes:
        schema_version: of this file.
        step: the trainer's step.
        num_steps: optimizer steps the engine has taken.
        schedule_step: position in the learning-rate schedule.
        num_optimizer_steps: Adam's bias-correction count.
        world_size: ranks that wrote.
        backend: whose names the tensors have.
        lora: shape of the adapter among the tensors, or None.
        num_averaged: optimizer steps in the moving average among the tensors; None: there is none.
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
    path: Path, tensors: Mapping[str, Tensor], scalars: EngineScalars, platform: PlatformBase
) -> None:
    """Write this rank's part; every rank calls it with the same path.

    Args:
        path: an existing directory, shared by all ranks.
        tensors: `model.<name>`, `optimizer.<moment>.<name>` and `optimizer.ema.<name>`, sharded as
            the engine holds them.
        scalars: what else to write.
        platform: gives the state of this rank's random generators.

    Raises:
        OSError: a rank could not write; the same on every rank.
        CheckpointError: a rank could not write its tensors.
    """
    (path / TENSORS_DIR).mkdir(exist_ok=True)
    save_sharded(path / TENSORS_DIR, tensors)
    problem: OSError | None = None
    try:
        _write_small_files(path, scalars, _rng_copy(platform), collectives.rank())
    except OSError as error:
        problem = error
    # Also the barrier: nobody goes on before all files are there.
    collectives.raise_together(problem, f"cannot save {path}")


def stage_engine_state(
    path: Path,
    tensors: Mapping[str, Tensor],
    scalars: EngineScalars,
    platform: PlatformBase,
    buffers: StagingBuffers,
) -> Callable[[], None]:
    """Copy this rank's part to the host; every rank calls it with the same path.

    Args:
        path: an existing directory, shared by all ranks.
        tensors: as for `save_engine_state`; they may change as soon as this returns.
        scalars: what else to write.
        platform: gives the state of this rank's random generators.
        buffers: to copy into; given back once they are written.

    Returns:
        Writes the copies, for any thread: it uses no collective and raises `OSError`.
    """
    (path / TENSORS_DIR).mkdir(exist_ok=True)
    write_tensors = stage_sharded(path / TENSORS_DIR, tensors, buffers)
    # Now: when the files are written, the group may have been closed.
    rng, rank = _rng_copy(platform), collectives.rank()

    def write() -> None:
        write_tensors()
        _write_small_files(path, scalars, rng, rank)

    return write


def _rng_copy(platform: PlatformBase) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in platform.rng_state().items()}


def _write_small_files(
    path: Path, scalars: EngineScalars, rng: dict[str, Tensor], rank: int
) -> None:
    """Random generators of this rank and, on rank 0, the scalars."""
    (path / _RNG_DIR).mkdir(exist_ok=True)
    write_tensors(rng, path / _RNG_DIR / f"rank-{rank:05d}.safetensors")
    if rank == 0:
        text = json.dumps(scalars.model_dump(), indent=1, sort_keys=True) + "\n"
        (path / ENGINE_FILE).write_text(text, encoding="utf-8")


def load_engine_state(
    path: Path, tensors: Mapping[str, Tensor], lora: LoraConfig | None, platform: PlatformBase
) -> EngineScalars:
    """Fill an engine's tensors in place, to continue; every rank calls it with the same path.

    Args:
        path: what `save_engine_state` wrote.
        tensors: as for `save_engine_state`; they are overwritten.
        lora: shape of the engine's adapter, or None.
        platform: its generators are restored when the world size is the same.

    Returns:
        The scalars of the checkpoint.

    Raises:
        CheckpointError: the directory is not a whole checkpoint of such an engine.
    """
    scalars = read_scalars(path)
    if scalars.lora != lora:
        raise CheckpointError(
            f"{path} was trained with training.lora {_shown(scalars.lora)}; this engine has "
            f"{_shown(lora)}: it can start from those weights, not continue"
        )
    _load_parts(path, tensors)
    if scalars.world_size == collectives.world_size():
        file = path / _RNG_DIR / f"rank-{collectives.rank():05d}.safetensors"
        if not file.exists():
            raise CheckpointError(f"{file} is absent")
        platform.set_rng_state(read_tensors(file))
    return scalars


def _load_parts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load; where all of the model or of the optimizer is absent, say so: it may be a mistake."""
    try:
        load_sharded(path / TENSORS_DIR, tensors)
    except CheckpointError as error:
        there = {_part_of(name) for name in _names_in(path / TENSORS_DIR)}
        absent = sorted({_part_of(name) for name in tensors} - there)
        if not there or not absent:
            raise
        raise CheckpointError(
            f"{path}: part {', '.join(map(repr, absent))} is absent; a stage is continued with all "
            "of it; weights alone must be asked for: export them and name them in model.path of a "
            "new run, or begin the stage anew with --force"
        ) from error


def _part_of(name: str) -> str:
    return name.partition(".")[0]


def _names_in(path: Path) -> set[str]:
    names = set[str]()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= {*opened.keys()}
    return names


def _shown(lora: LoraConfig | None) -> str:
    return "null" if lora is None else f"rank {lora.rank}, alpha {lora.alpha:g}"


def read_scalars(path: Path) -> EngineScalars:
    """The content of a checkpoint's `engine.json`.

    Args:
        path: directory of the checkpoint.

    Returns:
        The scalars.

    Raises:
        CheckpointError: there is none, or it is of another schema.
    """
    try:
        text = (path / ENGINE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not an engine checkpoint: no {ENGINE_FILE}") from error
    try:
        return EngineScalars.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{path / ENGINE_FILE}: {error}") from error
