"""Weight updates in the process that holds the model; orders and replies travel as JSON.

Promises: every tensor is checked for name, shape and dtype before the engine's library gets it; its
checksum is of the bytes that the library got. Libraries may pack weights for their kernels, so the
model itself has no checksum; `RolloutEngine.score` verifies it.

Reads tensor shapes, vocabulary, context and end tokens from a model directory.

Reads only `config.json` and `generation_config.json` and allocates no weights; names and shapes are
those that `save_pretrained` writes. The engine may still not know the architecture.

A weight source as JSON, for a receiver that runs in another process.

Promises: only frozen dataclasses of `engines.weight_sync` are accepted, so a message cannot make
the receiver import or build anything else.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.hub_names import hub_slots, served_float32_names
from engines.checkpoint.model_directory import rotary_limit, vision_model_type
from engines.checkpoint.stop_tokens import eos_token_ids
from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync.base import WeightDigest, WeightSource
from infra.errors import ConfigError, PipelineError


@dataclass(frozen=True)
class ModelLayout:
    """Layout of one model.

    Attributes:
        architecture: class name, for a configuration that does not state it.
        tensors: shape of every tensor on disk, tied ones once.
        float32: tensors that are float32 whatever the dtype of the others.
        tied: parameters that share memory with one of `tensors`.
        context_length: limit of prompt and response together, in tokens.
    """

    architecture: str
    tensors: dict[str, tuple[int, ...]]
    float32: frozenset[str]
    tied: frozenset[str]
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]

    @property
    def is_latent(self) -> bool:
        """True if the attention is latent (MLA), which engines compute with other kernels."""
        return any(".kv_a_proj_with_mqa." in name for name in self.tensors)


def read_layout(hf_dir: Path, engine: str, dtype: str) -> ModelLayout:
    """Read the layout of a model directory, or raise a ConfigError; `engine` is named in errors."""
    if not (hf_dir / "config.json").is_file():
        raise ConfigError("model.path", f"got {hf_dir}; need a directory with config.json")
    sees = vision_model_type(hf_dir)
    if sees is not None:
        raise ConfigError(
            "model.path",
            f"{hf_dir} is a {sees}, which sees images; the rollout engine {engine} samples from "
            "text models; choose one",
        )
    config = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    own = dict(model.named_parameters())
    limit = rotary_limit(config.to_dict())
    return ModelLayout(
        architecture=type(model).__name__,
        tensors={name: slot.size for name, slot in hub_slots(model).items()},
        float32=served_float32_names(hf_dir, getattr(torch, dtype)),
        tied=frozenset(n for n, _ in model.named_parameters(remove_duplicate=False)) - own.keys(),
        vocab_size=config.vocab_size,
        context_length=min(config.max_position_embeddings, limit or sys.maxsize),
        eos_token_ids=eos_token_ids(hf_dir, config),
    )


_PACKAGE = "engines.weight_sync."
_SCALARS = (str, int, float, bool)


def source_to_json(source: WeightSource) -> dict[str, Any]:
    """Return a source for `json.dumps`; WeightSyncError unless its fields are paths and scalars."""
    kind = type(source)
    if not is_dataclass(source) or not kind.__module__.startswith(_PACKAGE):
        raise WeightSyncError(
            f"{kind.__module__}.{kind.__qualname__} cannot travel to another process; need a "
            f"frozen dataclass of {_PACKAGE[:-1]}"
        )
    values: dict[str, Any] = {}
    for each in fields(source):
        value = getattr(source, each.name)
        if not isinstance(value, (Path, *_SCALARS)):
            raise WeightSyncError(f"{kind.__qualname__}.{each.name}: got {value!r}; need a scalar")
        values[each.name] = str(value) if isinstance(value, Path) else value
    return {"module": kind.__module__, "name": kind.__qualname__, "fields": values}


def source_from_json(data: Mapping[str, Any]) -> WeightSource:
    """Read the result of `source_to_json`; WeightSyncError if its class or fields are unknown."""
    module, name, values = str(data["module"]), str(data["name"]), data["fields"]
    if not module.startswith(_PACKAGE):
        raise WeightSyncError(f"{module}.{name} is no weight source of this project")
    kind = getattr(importlib.import_module(module), name, None)
    if not isinstance(kind, type) or not is_dataclass(kind) or kind.__module__ != module:
        raise WeightSyncError(f"{module}.{name} is no weight source of this project")
    hints = get_type_hints(kind)
    if {each.name for each in fields(kind)} != values.keys():
        raise WeightSyncError(f"{module}.{name}: got fields {', '.join(sorted(values))}")
    made: Any = kind(**{n: Path(v) if hints[n] is Path else v for n, v in values.items()})
    return made


NamedTensors = Iterator[tuple[str, Tensor]]

_REFUSALS = (AssertionError, AttributeError, KeyError, RuntimeError, ValueError, OSError)
"""Errors that libraries raise for weights that they cannot load."""


def order_of(source: WeightSource, layout: ModelLayout, dtype: str) -> str:
    """Return the order for `carry_out`."""
    return json.dumps(
        {
            "source": source_to_json(source),
            "shapes": layout.tensors,
            "tied": sorted(layout.tied),
            "float32": sorted(layout.float32),
            "dtype": dtype,
        }
    )


def carry_out(order: str, load: Callable[[NamedTensors], None], worker: int = 0) -> str:
    """Overwrite a model from a weight source in its process, number `worker`; return the reply.

    `load` loads all (name, tensor) pairs into the model.
    """
    parsed = json.loads(order)
    incoming = _Incoming(
        parsed["shapes"],
        set(parsed["tied"]),
        getattr(torch, parsed["dtype"]),
        set(parsed["float32"]),
    )
    try:
        source = source_from_json(parsed["source"]).of_worker(worker)
        load(incoming.check(source.tensors()))
        incoming.check_complete()
    except (PipelineError, *_REFUSALS) as error:
        kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
        return json.dumps({"error": f"{kind}{error}"})
    return json.dumps(
        {
            "digest": combine(incoming.checksums.items()),
            "num_tensors": len(incoming.checksums),
            "num_bytes": incoming.num_bytes,
        }
    )


def agreed(replies: Sequence[str]) -> WeightDigest:
    """Return the receipt that all processes agree on; an error of one fails the update."""
    receipts: set[WeightDigest] = set()
    for reply in map(json.loads, replies):
        if "error" in reply:
            raise WeightSyncError(reply["error"])
        receipts.add(WeightDigest(**reply))
    if len(receipts) != 1:
        raise WeightSyncError(
            f"the engine's processes hold {len(receipts)} different sets of weights"
        )
    return receipts.pop()


class _Incoming:
    """Checks tensors on their way into the model, and records their checksums."""

    def __init__(
        self,
        shapes: Mapping[str, list[int]],
        tied: set[str],
        dtype: torch.dtype,
        float32: set[str],
    ) -> None:
        self._shapes = shapes
        self._tied = tied
        self._dtype = dtype
        self._float32 = float32
        self.checksums: dict[str, str] = {}
        self.num_bytes = 0

    def check(self, tensors: NamedTensors) -> NamedTensors:
        """Pass the tensors on; raise a WeightSyncError at the first unexpected one."""
        for name, tensor in tensors:
            self._check(name, tensor)
            # Cloned: a library keeps tensors until their layer is complete; sources reuse memory.
            own = tensor.clone()
            self.checksums[name] = tensor_checksum(own)
            self.num_bytes += own.numel() * own.element_size()
            yield name, own

    def check_complete(self) -> None:
        """Raise a WeightSyncError if a tensor is missing."""
        missing = sorted(self._shapes.keys() - self.checksums.keys())
        if missing:
            raise WeightSyncError(f"{len(missing)} parameters were not sent, first {missing[0]}")

    def _check(self, name: str, tensor: Tensor) -> None:
        if name in self._tied:
            raise WeightSyncError(f"{name} is tied to another parameter; send the other one only")
        if name not in self._shapes:
            raise WeightSyncError(f"the rollout model has no parameter {name}")
        if name in self.checksums:
            raise WeightSyncError(f"{name} was sent twice")
        if list(tensor.shape) != self._shapes[name]:
            raise WeightSyncError(
                f"{name}: sent shape {tuple(tensor.shape)}, the rollout model has "
                f"{tuple(self._shapes[name])}"
            )
        wanted = torch.float32 if name in self._float32 else self._dtype
        if tensor.dtype != wanted:
            raise WeightSyncError(f"{name}: sent {tensor.dtype}, the rollout dtype is {wanted}")
