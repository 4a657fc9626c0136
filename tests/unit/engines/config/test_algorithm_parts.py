"""What a bad algorithm configuration gets, before anything is loaded."""

import re
from typing import Any

import pytest

from engines.config.algorithm import AlgorithmConfig, RewardConfig
from engines.config.options import check_parts
from engines.config.rollout import RolloutConfig
from engines.config.rules.algorithm import check_algorithm, check_critic, check_sampling
from engines.config.rules.models import (
    check_judge,
    check_reward_models,
    check_value_models,
    resolved_algorithm,
)
from engines.config.sections import RLConfig
from engines.config.training import TrainingConfig
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "path", "word"),
    [
        ({"adv_estimator": "gprpo"}, "rl.algorithm.adv_estimator", "did you mean grpo"),
        ({"loss_mode": "vanila"}, "rl.algorithm.loss_mode", "did you mean vanilla"),
        ({"kl_loss_type": "low_var"}, "rl.algorithm.kl_loss_type", "did you mean low_var_kl"),
        ({"kl_penalty": "k3+"}, "rl.algorithm.kl_penalty", "did you mean k3"),
        ({"options": {"tau": 1}}, "rl.algorithm.options.tau", "no 'tau'"),
    ],
)
def test_unknown_names(config, path, word):
    with pytest.raises(ConfigError, match=word) as caught:
        check_parts(AlgorithmConfig(**config))
    assert caught.value.path == path
    assert "\n" not in str(caught.value)


def test_a_group_of_one_is_refused_by_a_group_relative_estimator():
    with pytest.raises(ConfigError, match="needs >= 2") as caught:
        check_algorithm(RLConfig(group_size=1))
    assert caught.value.path == "rl.group_size"
    check_algorithm(RLConfig(group_size=2))


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (
            {"adv_estimator": "gae"},
            "rl.algorithm.adv_estimator",
            "got gae, which reads the column last_values; need the role critic (rl.critic), which "
            "this recipe lacks; add it, or choose one of grpo, ",
        ),
        (
            {"loss_mode": "gspo"},
            "rl.algorithm.loss_agg_mode",
            "got token-mean with loss_mode gspo; need seq-mean-token-mean",
        ),
        (
            {"adv_estimator": "gdpo", "use_kl_in_reward": True},
            "rl.algorithm.use_kl_in_reward",
            "use rl.algorithm.use_kl_loss",
        ),
        (
            {"adv_estimator": "gdpo", "overlong": {"enable": True}},
            "rl.algorithm.overlong.enable",
            "add a component length",
        ),
        (
            {
                "adv_estimator": "gdpo",
                "options": {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": []},
            },
            "rl.algorithm.options",
            "need 1, one for each",
        ),
    ],
)
def test_what_a_part_needs_and_a_recipe_lacks_is_refused(config, path, words):
    with pytest.raises(ConfigError) as caught:
        check_algorithm(RLConfig(algorithm=AlgorithmConfig(**config)))
    assert caught.value.path.startswith(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        (
            {"critic": {}},
            "rl.critic: got a critic with adv_estimator grpo, which reads no values; need null; "
            "remove it, or set rl.algorithm.adv_estimator to gae",
        ),
        (
            {"critic": {"start": "reward_model"}, "algorithm": {"adv_estimator": "gae"}},
            "rl.critic.start: got reward_model, and this recipe lacks the role reward "
            "(rl.reward.model); need that model; set rl.reward.model.path, or start from policy",
        ),
    ],
)
def test_critic_without_reader_or_start_model_is_refused(rl, words):
    with pytest.raises(ConfigError) as caught:
        check_critic(RLConfig.model_validate(rl))
    assert str(caught.value) == words
    critic = RLConfig.model_validate({"critic": {}, "algorithm": {"adv_estimator": "gae"}})
    check_algorithm(critic)
    check_critic(critic)
    check_critic(RLConfig())


@pytest.mark.parametrize(
    ("rl", "setting"),
    [
        ({"critic": {}, "algorithm": {"adv_estimator": "gae"}}, "rl.critic"),
        ({"reward": {"function": "model", "model": {"path": "judge"}}}, "rl.reward.model"),
    ],
)
def test_a_value_model_that_the_backend_does_not_have_is_refused(rl, setting):
    asked = RLConfig.model_validate(rl)
    with pytest.raises(ConfigError) as caught:
        check_value_models(asked, TrainingConfig(backend="torchtitan"))
    assert str(caught.value) == (
        f"{setting}: got one with training.backend torchtitan, which has no value model; need one "
        "of fsdp, fsdp2, megatron, veomni, automodel; set training.backend to it"
    )
    check_value_models(asked, TrainingConfig())
    check_value_models(RLConfig(), TrainingConfig(backend="torchtitan"))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (
            {"function": "model"},
            "rl.reward.function: got model, which reads the reward model's score; need "
            "rl.reward.model, which this recipe lacks; set rl.reward.model.path to a sequence "
            "classification model",
        ),
        (
            {
                "function": "mixture",
                "components": {"a": {"function": "exact"}, "b": {"function": "model"}},
                "accuracy": ["a"],
            },
            "rl.reward.components.b.function: got model, which reads the reward model's score; "
            "need rl.reward.model, which this recipe lacks; set rl.reward.model.path to a sequence "
            "classification model",
        ),
        (
            {"function": "judge", "model": {"path": "judge"}},
            "rl.reward.function: got judge, which reads a judge's text; need rl.reward.judge, "
            "which this recipe lacks; set rl.reward.judge.path and rl.reward.judge.prompt",
        ),
        (
            {"function": "exact", "judge": {"path": "judge", "prompt": "?"}},
            "rl.reward.judge: got a model, and nothing reads its output; remove it, or add a "
            "function or component judge",
        ),
        (
            {"function": "exact", "model": {"path": "judge"}},
            "rl.reward.model: got a model, and nothing reads its output; remove it, or add a "
            "function or component model",
        ),
    ],
)
def test_a_reward_model_is_there_if_and_only_if_it_is_read(reward, words):
    with pytest.raises(ConfigError) as caught:
        check_reward_models(RewardConfig.model_validate(reward))
    assert str(caught.value) == words
    judge = RewardConfig.model_validate(
        {"function": "judge", "judge": {"path": "judge", "prompt": "?", "options": {"tau": 1}}}
    )
    check_reward_models(judge)
    with pytest.raises(ConfigError, match=r"^rl.reward.judge.options.tau: not an option of"):
        check_judge(judge, RolloutConfig())
    for function in ("model", "score.py:score"):
        config = {"function": function, "model": {"path": "judge"}}
        check_reward_models(RewardConfig.model_validate(config))


def test_the_form_of_an_answer_is_no_verdict_of_it() -> None:
    algorithm = AlgorithmConfig(positive_nll_coef=0.1)
    with pytest.raises(ConfigError, match=r"positive_nll_coef: got 0.1 with .* format, which"):
        check_algorithm(RLConfig(algorithm=algorithm, reward=RewardConfig(function="format")))
    check_algorithm(RLConfig(algorithm=algorithm, reward=RewardConfig(function="exact")))
    components = {"short": {"function": "length"}, "right": {"function": "exact"}}
    mixed = {"function": "mixture", "components": components}
    check_reward_models(RewardConfig.model_validate({**mixed, "accuracy": ["right"]}))
    with pytest.raises(ConfigError, match=r"^rl.reward.accuracy: got short, whose function length"):
        check_reward_models(RewardConfig.model_validate({**mixed, "accuracy": ["short"]}))


def test_group_filter_with_group_size_one_is_refused() -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"adv_estimator": "reinforce_plus_plus", "filter_groups": {"enable": True}}
    )
    check_algorithm(RLConfig(algorithm=algorithm, group_size=2))
    with pytest.raises(ConfigError, match=r"filter_groups.enable: got true with rl.group_size 1"):
        check_algorithm(RLConfig(algorithm=algorithm, group_size=1))


RIGHT, SHORT, TESTS = {"function": "math"}, {"function": "length", "weight": -0.9}, "exact"
MIXTURE = {
    "function": "mixture",
    "components": {"right": RIGHT, "short": SHORT, "tests": {"function": TESTS}},
    "accuracy": ["right", "tests"],
    "routes": {"math": ["right", "short"], "code": ["tests", "short"]},
}


def compared(reward: dict[str, Any], **options: Any) -> dict[str, float]:
    algorithm = {"adv_estimator": "gdpo", "options": options}
    rl = RLConfig.model_validate({"algorithm": algorithm, "reward": reward})
    check_algorithm(rl)
    found = resolved_algorithm(rl).options
    return dict(zip(found["gdpo_reward_keys"], found["gdpo_reward_weights"], strict=True))


def test_gdpo_compares_the_mixture_by_its_weights() -> None:
    one = {**MIXTURE, "routes": {"math": ["right", "short"], "*": ["short", "right"]}}
    assert compared(one) == {"right": 1.0, "short": -0.9}
    assert compared(one, gdpo_reward_keys=["short", "acc"]) == {"short": -0.9, "acc": 1.0}
    own = {"gdpo_reward_keys": ["short"], "gdpo_reward_weights": [2.0]}
    assert compared(one, **own) == {"short": 2.0}
    assert compared(MIXTURE, gdpo_reward_keys=["short"]) == {"short": -0.9}
    assert compared({"function": "math"}, gdpo_reward_keys=["score"]) == {"score": 1.0}


@pytest.mark.parametrize(
    ("reward", "options", "words"),
    [
        (MIXTURE, {}, "gdpo_reward_keys: got null, and routes of different components"),
        (MIXTURE, {"gdpo_reward_keys": ["right"]}, "got 'right', which does not judge data_source"),
        (
            {**MIXTURE, "routes": {"*": ["right"]}},
            {"gdpo_reward_keys": ["taste"]},
            "got 'taste', which does not judge data_source '*'; need one of right, score, acc",
        ),
        ({"function": "math"}, {}, "gdpo_reward_keys: got null with rl.reward.function math"),
        (MIXTURE, {"gdpo_reward_weights": [1.0]}, "need gdpo_reward_keys too"),
    ],
)
def test_gdpo_is_refused_where_what_it_compares_is_open(reward, options, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        compared(reward, **options)


@pytest.mark.parametrize("path", ["rl.optimizer", "rl.critic.optimizer"])
def test_no_optimizer_of_a_round_has_a_schedule_that_ends(path: str) -> None:
    optimizer = {"optimizer": {"schedule": "cosine"}}
    rl = RLConfig.model_validate({"critic": optimizer} if "critic" in path else optimizer)
    with pytest.raises(ConfigError, match=f"^{path}.schedule: got 'cosine'; need 'constant'"):
        check_sampling(rl)
