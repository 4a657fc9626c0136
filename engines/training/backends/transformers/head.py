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

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")
"""Settings of architectures that rework logits after the head; they keep the whole logits."""


@dataclass(frozen=True)
class Targets:
    """What the head is asked for.

    Attributes:
        token_ids_N: (N,) int64, the token that each row of hidden states predicts.
        temperature: of the distribution.
        entropy: also compute entropies.
    """

    token_ids_N: Tensor
    temperature: float
    entropy: bool


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

    def __call__(
        self, rows_N: Tensor, targets: Targets, **inputs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model.

        Args:
            rows_N: (N,) int64, the positions whose hidden state predicts a target.
            targets: what they predict.
            **inputs: of the model.

        Returns:
            (N,) float32 log-probabilities, and (N,) float32 entropies or None.
        """
        self._targets = targets
        try:
            out = self._model(logits_to_keep=rows_N, **inputs).logits.squeeze(0)
        finally:
            self._targets = None
        if self._head is None:
            return token_logprobs(
                out, targets.token_ids_N, temperature=targets.temperature, entropy=targets.entropy
            )
        return out[:, 0], out[:, 1] if targets.entropy else None

    def _head_forward(self, input: Tensor) -> Tensor:
        """(1, N, D) hidden states to (1, N, 2): log-probability and entropy."""
        head = cast(nn.Linear, self._head)
        if self._targets is None:
            return linear(input, head.weight, head.bias)
        logprobs_N, entropy_N = linear_token_logprobs(
            input.squeeze(0),
            head.weight,
            self._targets.token_ids_N,
            bias_V=head.bias,
            temperature=self._targets.temperature,
            entropy=self._targets.entropy,
        )
        entropy_N = torch.zeros_like(logprobs_N) if entropy_N is None else entropy_N
        # Not a view: a sharded backend hangs its hooks on what the model returns.
        return torch.stack([logprobs_N[None], entropy_N[None]], dim=-1)
