"""Weight updates in the process that holds the model; orders and replies travel as JSON.

Promises: the layout of a model (names and shapes as `save_pretrained` writes them) is read from
`config.json` and `generation_config.json`, and no weights are allocated. Every tensor is checked
before the engine's library gets it; its checksum is of the bytes that the library got. An order
names a frozen dataclass of `engines.weight_sync` as its source; the receiver imports and builds
nothing else.
Does not promise a checksum of the model itself, since libraries may pack weights for their kernels
(a probe compares logprobs), or that the engine supports the architecture.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines.checkpoint.hub_names import hub_slots, served_float32_names
from engines.checkpoint.model_directory import rotary_limit, vision_model_type
from engines.checkpoint.stop_tokens import eos_token_ids
from engines.checksum import TensorChecksums
from engines.errors import WeightSyncError
from engines.rollout.expected_tensors import ExpectedTensors, tied_names
from engines.weight_sync.base import WeightDigest, WeightSource
from infra.errors import ConfigError, PipelineError

_PACKAGE = "engines.weight_sync."
_SCALARS = (str, int, float, bool)
NamedTensors = Iterator[tuple[str, Tensor]]
_REFUSALS = (AssertionError, AttributeError, KeyError, RuntimeError, ValueError, OSError)
"""Errors that libraries raise for weights that they cannot load."""


@dataclass(frozen=True)
class ModelLayout:
    """Tensors that a model is loaded from, and limits that requests are checked against.

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
    if sees := vision_model_type(hf_dir):
        raise ConfigError(
            "model.path",
            f"{hf_dir} is a {sees}, which sees images; the rollout engine {engine} samples from "
            "text models only; choose a text model, or the rollout engine transformers",
        )
    config = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    return ModelLayout(
        architecture=type(model).__name__,
        tensors={name: slot.size for name, slot in hub_slots(model).items()},
        float32=served_float32_names(hf_dir, getattr(torch, dtype)),
        tied=tied_names(model),
        vocab_size=config.vocab_size,
        context_length=min(
            config.max_position_embeddings, rotary_limit(config.to_dict()) or sys.maxsize
        ),
        eos_token_ids=eos_token_ids(hf_dir, config),
    )


def source_to_json(source: WeightSource) -> dict[str, Any]:
    """Return a source for `json.dumps`; WeightSyncError unless its fields are paths and scalars."""
    kind = type(source)
    if not is_dataclass(source) or not kind.__module__.startswith(_PACKAGE):
        raise WeightSyncError(
            f"{kind.__module__}.{kind.__qualname__} cannot travel to another process; need a "
            f"frozen dataclass of {_PACKAGE[:-1]}"
        )
    values = {each.name: getattr(source, each.name) for each in fields(source)}
    for name, value in values.items():
        if not isinstance(value, (Path, *_SCALARS)):
            raise WeightSyncError(f"{kind.__qualname__}.{name}: got {value!r}; need a scalar")
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "fields": {n: str(v) if isinstance(v, Path) else v for n, v in values.items()},
    }


def source_from_json(data: Mapping[str, Any]) -> WeightSource:
    """Read the result of `source_to_json`; WeightSyncError if its class or fields are unknown."""
    module, name, values = str(data["module"]), str(data["name"]), data["fields"]
    is_ours = module.startswith(_PACKAGE)
    kind: Any = getattr(importlib.import_module(module), name, None) if is_ours else None
    if not isinstance(kind, type) or not is_dataclass(kind) or kind.__module__ != module:
        raise WeightSyncError(f"{module}.{name} is no weight source of this project")
    if {each.name for each in fields(kind)} != values.keys():
        raise WeightSyncError(f"{module}.{name}: got fields {', '.join(sorted(values))}")
    hints = get_type_hints(kind)
    source: Any = kind(**{n: Path(v) if hints[n] is Path else v for n, v in values.items()})
    return source


def order_of(source: WeightSource, layout: ModelLayout, dtype: str) -> str:
    """Return an order, as JSON, with which `carry_out` loads the tensors of `source`."""
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
    """Execute an order in worker process `worker`; return the reply: a digest or an error.

    `load` overwrites the model with the (name, tensor) pairs that it gets.
    """
    parsed = json.loads(order)
    dtype: torch.dtype = getattr(torch, parsed["dtype"])
    expected = ExpectedTensors(
        {
            name: (tuple(shape), torch.float32 if name in parsed["float32"] else dtype)
            for name, shape in parsed["shapes"].items()
        },
        parsed["tied"],
    )
    try:
        source = source_from_json(parsed["source"]).of_worker(worker)
        checksums = TensorChecksums(source.checksum_method)
        load(_checked(source.tensors(), expected, checksums))
        expected.check_complete()
    except (PipelineError, *_REFUSALS) as error:
        kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
        return json.dumps({"error": f"{kind}{error}"})
    return json.dumps(asdict(WeightDigest.of(checksums)))


def agreed(replies: Sequence[str]) -> WeightDigest:
    """Return the digest that all replies have; WeightSyncError if one is an error or differs."""
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


def _checked(
    tensors: NamedTensors, expected: ExpectedTensors, checksums: TensorChecksums
) -> NamedTensors:
    """Check tensors on their way into the model, and compute the checksum of each."""
    for name, tensor in tensors:
        expected.check(name, tensor)
        # Sources reuse memory, and libraries keep tensors: vLLM until their layer is complete,
        # SGLang those that it fuses, as DeepSeek's projections. On a device a clone is cheap.
        own = tensor.clone()
        checksums.add(name, own)
        yield name, own
