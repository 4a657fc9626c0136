"""The output head of a causal LM, changed to return requested logprobs instead of all logits.

It runs inside the model's forward pass, where a sharded backend has gathered its weight.

Reads the weights of a checkpoint with its adapter merged in.

An engine that starts anew from a checkpoint of an adapter needs its sum with the frozen weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR, read_scalars
from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import ShardedReader, load_sharded
from engines.config.training import LoraConfig
from engines.errors import CheckpointError, EngineError
from engines.training.backends.transformers.adapters import (
    assign,
    base_name,
    initialize_adapter,
    is_adapter_name,
    stored_adapter,
    whole_tensor,
    wrapped_name,
)
from engines.training.backends.transformers.build import build_on_meta
from engines.training.model.linear_logprobs import Targets, head_rows
from engines.training.model.linear_tiles import tile_elements
from engines.training.model.logprobs import token_logprobs
from engines.training.spec import VALUE_HEAD, EngineSpec

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")
"""Settings of architectures that change logits after the head; they need whole logits."""


class LogprobHead:
    """Calls a model for logprobs of given tokens.

    With `chunked`, computes them inside the head, tile by tile, if the architecture allows.
    `why_whole` is the reason for whole logits, or None.
    """

    def __init__(self, model: PreTrainedModel, *, chunked: bool) -> None:
        self._model = model
        self._targets: Targets | None = None
        head = model.get_output_embeddings()
        config = model.config.get_text_config()
        reworked = [n for n in _CHANGES_LOGITS if getattr(config, n, None) not in (None, 1)]
        self._head = head if chunked and type(head) is nn.Linear and not reworked else None
        self.why_whole: str | None = None
        if self._head is None:
            self.why_whole = f"the architecture sets {', '.join(reworked)}" if reworked else (
                f"its head is a {type(head).__name__}" if chunked else
                "training.chunked_logprobs is false, or ranks of the backend share its vocabulary"
            )  # fmt: skip
        else:
            self._head.forward = self._head_forward

    def __call__(self, rows_N: Tensor, targets: Targets, **inputs: object) -> Tensor:
        """Return (K, N) float32 logprobs, then other readouts, of the hidden states at `rows_N`.

        Raises:
            EngineError: readouts need several tokens per position, but the head makes whole logits.
        """
        asked = targets.readouts
        if self._head is None and (asked.logprobs_of is not None or asked.num_top):
            raise EngineError(
                f"readouts: got {asked}; need a head that is computed chunk by chunk, but "
                f"{self.why_whole}; set training.chunked_logprobs, or choose another backend "
                "or model"
            )
        self._targets = targets
        try:
            out = self._model(logits_to_keep=rows_N, **inputs).logits.squeeze(0)
        finally:
            self._targets = None
        if self._head is None:
            return token_logprobs(
                out,
                targets.token_ids_N,
                temperature=targets.temperature,
                entropy=asked.entropy,
                sum_pi_squared=asked.sum_pi_squared,
            ).stacked()
        return out.T

    def _head_forward(self, input: Tensor) -> Tensor:
        """Map (1, N, D) hidden states to (1, N, K) readouts."""
        head = cast(nn.Linear, self._head)
        if self._targets is None:
            return linear(input, head.weight, head.bias)
        rows = head_rows(
            input.squeeze(0), head.weight, self._targets, bias_V=head.bias,
            chunk_elements=tile_elements(input, chunked=True),
        )  # fmt: skip
        # Not a view: a sharded backend registers hooks on the outputs.
        return rows.T[None].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def load_folded(path: Path, named: Mapping[str, torch.Tensor], spec: EngineSpec) -> int:
    """Fill weights from a checkpoint with its adapter merged in; return its step. Collective.

    Raises:
        CheckpointError: a tensor is absent or has another shape.
    """
    scalars = read_scalars(path)
    reader = ShardedReader(path / TENSORS_DIR)
    stored = set(reader.names())
    own = {base_name(name): tensor for name, tensor in named.items() if not is_adapter_name(name)}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        plain, wrapped = MODEL_PREFIX + name, MODEL_PREFIX + wrapped_name(name)
        wanted[plain if plain in stored or wrapped not in stored else wrapped] = tensor
    load_sharded(path / TENSORS_DIR, wanted)
    if scalars.lora is not None:
        _add_stored_adapter(reader, own, scalars.lora, path)
    if spec.training.lora is not None and spec.optimizer is not None:
        initialize_adapter(named, spec.seed)
    return scalars.step


def _add_stored_adapter(
    reader: ShardedReader, own: dict[str, torch.Tensor], lora: LoraConfig, path: Path
) -> None:
    num_merged = 0
    for name, tensor in own.items():
        adapter = stored_adapter(name, reader, lora)
        if adapter is not None:
            assign(tensor, adapter.merged_into(whole_tensor(tensor)))
            num_merged += 1
    if num_merged == 0:
        raise CheckpointError(f"{path} says it holds an adapter, but there is none in it")


def stored_weights(checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream a checkpoint's whole weights by hub name on the CPU, without a process group.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
    """
    lora = read_scalars(checkpoint).lora
    reader = ShardedReader(checkpoint / TENSORS_DIR)
    stored = {
        name.removeprefix(MODEL_PREFIX): reader.shape(name)
        for name in reader.names()
        if name.startswith(MODEL_PREFIX)
    }
    model = build_on_meta(
        hf_dir, "value_model" if f"{VALUE_HEAD}weight" in stored else "language_model"
    )
    expected = {name: tuple(tensor.shape) for name, tensor in named_state(model)}
    held = {base_name(name): shape for name, shape in stored.items() if not is_adapter_name(name)}
    if held != expected:
        wrong = sorted(name for name, _ in held.items() ^ expected.items())
        raise CheckpointError(
            f"{checkpoint}: does not fit {hf_dir / 'config.json'} at {', '.join(wrong[:3])}"
        )
    names = {base_name(name): name for name in stored if not is_adapter_name(name)}

    def whole(name: str) -> torch.Tensor:
        tensor = reader.read(MODEL_PREFIX + names[name])
        adapter = stored_adapter(name, reader, lora) if lora else None
        return tensor if adapter is None else adapter.merged_into(tensor)

    yield from HubNames(model).stream((name, whole(name)) for name in expected)
