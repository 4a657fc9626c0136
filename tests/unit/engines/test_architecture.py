"""What is known of an architecture before a model of it is made."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from engines.architecture import class_refusal, model_class, position_refusal

TINY = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3", None),
        ("gpt2", None),
        ("bloom", "is a BloomForCausalLM, whose attention cannot be replaced"),
    ],
)
def test_a_class_is_asked_for_its_attention(model_type: str, reason: str | None) -> None:
    assert class_refusal(AutoModelForCausalLM, AutoConfig.for_model(model_type)) == reason


def test_a_class_that_transformers_has_not_is_named() -> None:
    config = AutoConfig.for_model("olmo2")
    assert model_class(AutoModelForTokenClassification, config) is None
    said = class_refusal(AutoModelForTokenClassification, config)
    assert said == "is a olmo2, of which transformers has no AutoModelForTokenClassification"
    assert model_class(AutoModelForCausalLM, PretrainedConfig()) is None


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "data2vec-text", "camembert"])
def test_positions_that_count_from_the_padding_token_on_are_seen(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, is_decoder=True, pad_token_id=1, **TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert position_refusal(model) is not None


@pytest.mark.parametrize("model_type", ["bert", "opt", "gpt2", "qwen2"])
def test_positions_that_count_from_0_are_not_refused(model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY))
    assert position_refusal(model) is None
