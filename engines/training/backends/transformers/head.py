"""The output head of a causal LM, turned from "all logits" into "the log-probabilities asked for".

The head runs inside the model's own forward pass, where a sharded backend has its weight at
hand; it computes log-probabilities (and entropies) chunk by chunk and never holds all logits.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engines.training.model.linear_logprobs import linear_token_logprobs
from engines.training.model.logprobs import token_logprobs
from engines.types import Readouts

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")
"""Settings of architectures that rework logits after the head; they keep the whole logits."""


@dataclass(frozen=True)
class Targets:
    """What the head is asked for.

    Attributes:
        token_ids_N: (N,) int64, the token that each row of hidden states predicts.
        temperature: of the distribution.
        readouts: what else.
    """

    token_ids_N: Tensor
    temperature: float
    readouts: Readouts


class LogprobHead:
    """Calls a model for log-probabilities of chosen tokens.

    Args:
        model: a causal LM.
        chunked: compute them inside the head, chunk by chunk, where the architecture allows.
    """

    def __init__(self, model: PreTrainedModel, *, chunked: bool) -> None:
        self._model = model
        self._targets: Targets | None = None
        head = model.get_output_embeddings()
        reworked = any(
            getattr(model.config.get_text_config(), name, None) not in (None, 1)
            for name in _CHANGES_LOGITS
        )
        self._head = head if chunked and type(head) is nn.Linear and not reworked else None
        if self._head is not None:
            self._head.forward = self._head_forward

    def __call__(self, rows_N: Tensor, targets: Targets, **inputs: object) -> Tensor:
        """Run the model.

        Args:
            rows_N: (N,) int64, the positions whose hidden state predicts a target.
            targets: what they predict.
            **inputs: of the model.

        Returns:
            (K, N) float32: log-probabilities, then what else was asked for.
        """
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
                entropy=targets.readouts.entropy,
                sum_pi_squared=targets.readouts.sum_pi_squared,
            ).stacked()
        return out.T

    def _head_forward(self, input: Tensor) -> Tensor:
        """(1, N, D) hidden states to (1, N, K): log-probability, and what else is asked for."""
        head = cast(nn.Linear, self._head)
        if self._targets is None:
            return linear(input, head.weight, head.bias)
        readouts = self._targets.readouts
        found = linear_token_logprobs(
            input.squeeze(0),
            head.weight,
            self._targets.token_ids_N,
            bias_V=head.bias,
            temperature=self._targets.temperature,
            entropy=readouts.entropy,
            sum_pi_squared=readouts.sum_pi_squared,
        )
        # Not a view: a sharded backend hangs its hooks on what the model returns.
        return torch.stack([row[None] for row in found if row is not None], dim=-1)
