"""A rule is written once: the recipe and the stage's configuration, which the job checks, agree."""

import pytest

from engines.config.stages import RLRoundStageConfig
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("rl.group_size", 1, "grpo needs >= 2"),
        ("rl.algorithm.overlong", {"enable": True, "buffer_length": 9}, "need at most"),
        ("rl.sampling.temperature", 0, "greedy"),
        ("rl.sampling.max_new_tokens", 64, "lower"),
        ("rl.batch_size_prompts", 63, "use 62 or 64"),
        ("training.tensor_parallel_size", 2, "no tensor parallelism"),
    ],
)
def test_recipe_and_job_refuse_with_one_rule(path: str, value: object, word: str) -> None:
    changes = [f"{path}={value}".replace("True", "true"), "training.num_workers=2"]
    with pytest.raises(ConfigError, match=word) as early:
        load_recipe("quickstart", changes)
    config = load_recipe("quickstart").rl_round_stage(1).model_dump(mode="json")
    config["training"]["num_workers"] = 2
    level = config
    *above, last = path.split(".")
    for key in above:
        level = level[key]
    level[last] = value
    with pytest.raises(ConfigError, match=word) as late:
        RLRoundStageConfig.model_validate(config).check()
    assert early.value.path == late.value.path
