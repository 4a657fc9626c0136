"""Settings of a teacher that teach nothing, or the wrong thing."""

from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.plugins import ROLLOUT_ENGINES, register_plugin
from engines.config.rollout import RolloutConfig
from engines.config.rules.algorithm import (
    check_algorithm,
    check_distillation,
    check_served_teacher,
    num_spare_tokens,
)
from engines.config.sections import RLConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.rollout.base import Capability
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
        ({"loss": "k3+"}, {"num_epochs": 2}, "rl.distillation.loss", "an older policy"),
        ({"loss": "k3+", "num_top": 8}, {}, "rl.distillation.num_top", "got 8 with .* k3\\+"),
        ({"loss": "k2", "tail": "ignore"}, {}, "rl.distillation.tail", "set the loss to topk"),
        (
            {"loss": "k2"},
            {"batch_size_prompts": 8, "mini_batch_size_prompts": 4},
            "rl.distillation.loss",
            "an older policy",
        ),
        ({}, {"critic": {}}, "rl.critic", "raise rl.distillation.policy_weight"),
        (
            {},
            {"algorithm": {"adv_estimator": "raft"}},
            "rl.algorithm.adv_estimator",
            "got raft, which selects samples by reward",
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
        ({"num_top": 8, "tail": "ignore"}, {}),
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


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine of somebody else's that samples and says nothing of given tokens."""
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("rollout", "plain", "my_engine:PlainEngine", capabilities=("prefix_cache",))
    return "plain"


def test_engine_without_prompt_logprobs_is_refused_for_a_teacher(
    plain_engine: str,
) -> None:
    with pytest.raises(
        ConfigError, match="rollout.engine plain, which cannot return logprobs"
    ) as found:
        check_served_teacher(rl_with({"served": {}}), RolloutConfig(engine=plain_engine), 64)
    assert found.value.path == "rl.distillation.served"
    assert "need sglang or transformers or vllm; set rollout.engine to one" in str(found.value)
    # On the ranks it is no engine's business.
    check_served_teacher(rl_with({}), RolloutConfig(engine=plain_engine), 64)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_temperature_that_an_engine_does_not_know_is_refused(engine: str) -> None:
    rollout, sampling = RolloutConfig(engine=engine), {"sampling": {"temperature": 0.7}}
    with pytest.raises(ConfigError, match="only at temperature 1, with .* 0.7; need transformers"):
        check_served_teacher(rl_with({"served": {}}, **sampling), rollout, 64)
    check_served_teacher(rl_with({"served": {}}), rollout, 64)
    check_served_teacher(rl_with({"served": {}}, **sampling), RolloutConfig(), 64)


@pytest.mark.parametrize(
    ("engine", "options", "setting"),
    [
        ("transformers", {"max_model_len": 64}, "rl.distillation.served.options.max_model_len"),
        ("vllm", {"max_model_len": 64}, "rl.distillation.served.options.max_model_len"),
        ("vllm", {"tensor_parallel": 2}, "rl.distillation.served.options.tensor_parallel"),
    ],
)
def test_unknown_or_tight_teacher_engine_options_are_refused(
    engine: str, options: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError) as found:
        check_served_teacher(
            rl_with({"served": {"options": options}}), RolloutConfig(engine=engine), 64
        )
    assert found.value.path == setting


def test_engine_rows_name_capabilities_and_spare_tokens() -> None:
    known = {each.value for each in Capability}
    for name, num_tokens in (("transformers", 0), ("vllm", 1), ("sglang", 1)):
        row = ROLLOUT_ENGINES.place(name)
        assert {*row.capabilities} <= known
        served = rl_with({"served": {}}).distillation
        assert served is not None
        assert num_spare_tokens(served, name) == row.num_spare_tokens == num_tokens
        assert num_spare_tokens(served, None) == 0
    held = rl_with({}).distillation
    assert held is not None
    assert num_spare_tokens(held, "vllm") == 0


def test_round_checks_teacher_and_its_engines_count_as_execution() -> None:
    def round_with(**served: Any) -> RLRoundStageConfig:
        return RLRoundStageConfig.model_validate(
            {
                "round": 1,
                "model": {"init": "random"},
                "training": {},
                "rollout": {"engine": "vllm"},
                "rl": {"distillation": {"path": "teacher", **served}},
                "checkpoint": {},
            }
        )

    held, asked = round_with(), round_with(served={})
    changes = [str(change) for change in asked.changes(held)]
    assert len(changes) == 1
    assert changes[0].startswith("rl.distillation.served None -> ")
    assert all(change.is_execution for change in asked.changes(held))
    more = round_with(served={"num_replicas": 2})
    assert [change.field for change in more.changes(asked)] == [
        "rl.distillation.served.num_replicas"
    ]
    with pytest.raises(ConfigError, match="served.options"):
        round_with(served={"options": {"unknown": 1}}).check()
