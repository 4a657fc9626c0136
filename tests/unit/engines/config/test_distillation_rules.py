"""Settings of a teacher that teach nothing, or the wrong thing."""

from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.rules.algorithm import check_algorithm
from engines.config.rules.distillation import check_distillation
from engines.config.sections import RLConfig
from infra.errors import ConfigError


def rl_with(distillation: dict[str, Any], **settings: Any) -> RLConfig:
    given = {"distillation": {"path": "teacher", **distillation}, **settings}
    return RLConfig.model_validate(given)


@pytest.mark.parametrize(
    ("distillation", "settings", "setting", "said"),
    [
        ({"loss": "topp"}, {}, "rl.distillation.loss", "need topk or one of abs, k1"),
        ({"loss": "k1"}, {}, "rl.distillation.loss", "set k1\\+"),
        ({"loss": "kl"}, {}, "rl.distillation.loss", "gradient is 0 on average"),
        ({"loss": "k3+"}, {"num_epochs": 2}, "rl.distillation.loss", "an older policy's"),
        (
            {"loss": "k2"},
            {"batch_size_prompts": 8, "mini_batch_size_prompts": 4},
            "rl.distillation.loss",
            "an older policy's",
        ),
        ({}, {"critic": {}}, "rl.critic", "raise rl.distillation.policy_weight"),
        (
            {},
            {"algorithm": {"adv_estimator": "raft"}},
            "rl.algorithm.adv_estimator",
            "got raft, which chooses by rewards",
        ),
        ({}, {"algorithm": {"use_kl_loss": True}}, "rl.algorithm.use_kl_loss", "remove it"),
        ({}, {"algorithm": {"entropy_coeff": 0.1}}, "rl.algorithm.entropy_coeff", "remove it"),
        (
            {},
            {"algorithm": {"filter_groups": {"enable": True}}},
            "rl.algorithm.filter_groups.enable",
            "remove it",
        ),
    ],
)
def test_what_would_teach_nothing_is_refused(
    distillation: dict[str, Any], settings: dict[str, Any], setting: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        check_distillation(rl_with(distillation, **settings))
    assert found.value.path == setting


@pytest.mark.parametrize(
    ("distillation", "settings"),
    [
        ({}, {"num_epochs": 2}),
        ({"loss": "k1+"}, {}),
        ({"policy_weight": 0.5}, {"algorithm": {"use_kl_loss": True}}),
    ],
)
def test_what_teaches_is_taken(distillation: dict[str, Any], settings: dict[str, Any]) -> None:
    check_distillation(rl_with(distillation, **settings))


def test_groups_of_one_are_enough_where_no_reward_teaches() -> None:
    check_algorithm(rl_with({}, group_size=1))
    with pytest.raises(ConfigError, match="needs >= 2"):
        check_algorithm(rl_with({"policy_weight": 1.0}, group_size=1))


def test_a_teacher_has_to_be_named() -> None:
    with pytest.raises(ValidationError, match="path: missing; need the teacher"):
        RLConfig.model_validate({"distillation": {}})
