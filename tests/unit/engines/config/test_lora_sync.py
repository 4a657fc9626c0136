"""Where an adapter travels alone, and what is said where it cannot."""

import pytest

from engines.config.model import adapter_travels
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig, TrainingConfig
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError

TRAINING = TrainingConfig(backend="fsdp2", lora=LoraConfig())
ROLLOUT = RolloutConfig(engine="vllm", placement="disaggregated")


@pytest.mark.parametrize(
    ("training", "rollout", "said"),
    [
        ({"lora": None}, {}, "training.lora is null"),
        ({"lora": LoraConfig(use_dora=True)}, {}, "use_dora is true"),
        ({"backend": "megatron"}, {}, "training.backend is megatron; need one of fsdp, fsdp2"),
        ({}, {"engine": "transformers"}, "rollout.engine is transformers; need one of vllm"),
        ({}, {"placement": "colocated"}, "need disaggregated"),
    ],
)
def test_auto_merges_where_adapter_is_refused(training: dict, rollout: dict, said: str) -> None:
    changed = TRAINING.model_copy(update=training)
    assert adapter_travels(TRAINING, ROLLOUT)
    assert not adapter_travels(changed, ROLLOUT.model_copy(update=rollout))
    alone = ROLLOUT.model_copy(update={**rollout, "lora_sync": "adapter"})
    with pytest.raises(ConfigError, match=said) as refused:
        adapter_travels(changed, alone)
    assert refused.value.path == "rollout.lora_sync"
    assert refused.value.problem.endswith("choose auto or merged")


def test_merged_is_merged() -> None:
    assert not adapter_travels(TRAINING, ROLLOUT.model_copy(update={"lora_sync": "merged"}))


def test_a_recipe_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.lora_sync: got adapter, and training\.lora"):
        load_recipe("quickstart", ["rollout.lora_sync=adapter"])
    with pytest.raises(ConfigError, match=r"^rollout\.options\.tensor_parallel_size: got 2 with"):
        load_recipe("quickstart", ["rollout.engine=vllm", "rollout.options.tensor_parallel_size=2"])
