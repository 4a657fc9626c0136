"""Which output heads compute log-probabilities tile by tile."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from engines.training.backends.transformers.head import LogprobHead


class DoublingHead(nn.Linear):
    """A head whose logits are not the product with its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


# `fully_shard` of a head of its own changes its class in this way.
SHARDED = type("FSDPLinear", (FSDPModule, nn.Linear), {})


@pytest.mark.parametrize(("head", "is_whole"), [(SHARDED, False), (DoublingHead, True)])
def test_a_head_is_whole_only_where_its_forward_differs(
    head: type[nn.Linear], is_whole: bool, make_model: Callable[..., Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model("qwen3"))
    model.lm_head.__class__ = head
    assert (LogprobHead(model, chunked=True).why_whole is not None) == is_whole
