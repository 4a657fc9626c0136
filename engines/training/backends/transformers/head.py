"""The output head of a causal LM, changed to return requested logprobs instead of all logits.

It runs inside the model's forward pass, where a sharded backend has gathered its weight.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engines.errors import EngineError
from engines.training.model.linear_logprobs import Targets, head_rows
from engines.training.model.linear_tiles import tile_elements
from engines.training.model.logprobs import token_logprobs

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
        self._head = head = cast(nn.Linear, model.get_output_embeddings())
        config = model.config.get_text_config()
        reworked = [n for n in _CHANGES_LOGITS if getattr(config, n, None) not in (None, 1)]
        reasons = {
            f"the architecture sets {', '.join(reworked)}": bool(reworked),
            "training.chunked_logprobs is false, or ranks of the backend share its vocabulary": (
                not chunked
            ),
            f"its head is a {type(head).__name__}": type(head).forward is not nn.Linear.forward,
        }
        self.why_whole = next((reason for reason, holds in reasons.items() if holds), None)
        if self.why_whole is None:
            head.forward = self._head_forward

    def __call__(self, rows_N: Tensor, targets: Targets, **inputs: object) -> Tensor:
        """Return (K, N) float32 logprobs, then other readouts, of the hidden states at `rows_N`.

        Raises:
            EngineError: readouts need several tokens per position, but the head makes whole logits.
        """
        asked = targets.readouts
        if self.why_whole is not None and (asked.logprobs_of is not None or asked.num_top):
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
        if self.why_whole is None:
            return out.T
        found = token_logprobs(
            out,
            targets.token_ids_N,
            temperature=targets.temperature,
            entropy=asked.entropy,
            sum_pi_squared=asked.sum_pi_squared,
        )
        return found.read_for(asked).stacked()

    def _head_forward(self, input: Tensor) -> Tensor:
        """Map (1, N, D) hidden states to (1, N, K) readouts."""
        head = self._head
        if self._targets is None:
            return linear(input, head.weight, head.bias)
        rows = head_rows(
            input.squeeze(0), head.weight, self._targets, bias_V=head.bias,
            chunk_elements=tile_elements(input, chunked=True),
        )  # fmt: skip
        # Not a view: a sharded backend registers hooks on the outputs.
        return rows.T[None].clone(memory_format=torch.contiguous_format)
