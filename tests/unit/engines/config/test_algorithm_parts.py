"""What a bad algorithm configuration gets, before anything is loaded."""

import pytest

from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rules import check_algorithm, check_critic
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
    ("rl", "backend", "words"),
    [
        (
            {"critic": {}},
            "fsdp2",
            "rl.critic: got a critic with adv_estimator grpo, which reads no values; need null; "
            "remove it, or set rl.algorithm.adv_estimator to gae",
        ),
        (
            {"critic": {}, "algorithm": {"adv_estimator": "gae"}},
            "torchtitan",
            "rl.critic: got a critic with training.backend torchtitan, which has no value model; "
            "need one of fsdp, fsdp2, megatron, veomni, automodel; set training.backend to it",
        ),
    ],
)
def test_a_critic_that_nothing_reads_or_nothing_trains_is_refused(rl, backend, words):
    with pytest.raises(ConfigError) as caught:
        check_critic(RLConfig.model_validate(rl), TrainingConfig(backend=backend))
    assert str(caught.value) == words
    critic = RLConfig.model_validate({"critic": {}, "algorithm": {"adv_estimator": "gae"}})
    check_algorithm(critic)
    check_critic(critic, TrainingConfig())
    check_critic(RLConfig(), TrainingConfig(backend="torchtitan"))


def test_a_reference_that_nothing_reads_is_not_refreshed():
    with pytest.raises(ConfigError, match="got true, and nothing reads a reference; need false"):
        check_algorithm(RLConfig(refresh_reference=True))
    check_algorithm(RLConfig(refresh_reference=True, algorithm=AlgorithmConfig(use_kl_loss=True)))


def test_the_shipped_variants_pass():
    check_algorithm(RLConfig(group_size=8))
    check_parts(
        AlgorithmConfig(norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum-norm")
    )
    check_parts(AlgorithmConfig(use_kl_loss=True, kl_loss_type="k3+"))
