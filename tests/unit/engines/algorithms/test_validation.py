"""What a bad algorithm configuration gets, before anything is loaded."""

import pytest

from engines.algorithms.validation import validate_algorithm
from engines.config.algorithm import AlgorithmConfig
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "path", "word"),
    [
        ({"adv_estimator": "gprpo"}, "rl.algorithm.adv_estimator", "did you mean grpo"),
        ({"loss_mode": "vanila"}, "rl.algorithm.loss_mode", "did you mean vanilla"),
        ({"kl_loss_type": "low_var"}, "rl.algorithm.kl_loss_type", "did you mean low_var_kl"),
        ({"options": {"tau": 1}}, "rl.algorithm.options.tau", "no 'tau'"),
    ],
)
def test_unknown_names(config, path, word):
    with pytest.raises(ConfigError, match=word) as caught:
        validate_algorithm(AlgorithmConfig(**config))
    assert caught.value.path == path
    assert "\n" not in str(caught.value)


def test_a_group_of_one_is_refused_by_a_group_relative_estimator():
    with pytest.raises(ConfigError, match="needs >= 2") as caught:
        validate_algorithm(AlgorithmConfig(), group_size=1)
    assert caught.value.path == "rl.group_size"
    validate_algorithm(AlgorithmConfig(), group_size=2)


def test_the_shipped_variants_pass():
    validate_algorithm(AlgorithmConfig(), group_size=8)
    validate_algorithm(
        AlgorithmConfig(norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum-norm")
    )
    validate_algorithm(AlgorithmConfig(use_kl_loss=True, kl_loss_type="k3+"))
