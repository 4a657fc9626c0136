"""What a bad algorithm configuration gets, before anything is loaded."""

import pytest

from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.rules import check_algorithm
from engines.config.sections import RLConfig
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
        check_parts(AlgorithmConfig(**config))
    assert caught.value.path == path
    assert "\n" not in str(caught.value)


def test_a_group_of_one_is_refused_by_a_group_relative_estimator():
    with pytest.raises(ConfigError, match="needs >= 2") as caught:
        check_algorithm(RLConfig(group_size=1))
    assert caught.value.path == "rl.group_size"
    check_algorithm(RLConfig(group_size=2))


def test_the_shipped_variants_pass():
    check_algorithm(RLConfig(group_size=8))
    check_parts(
        AlgorithmConfig(norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum-norm")
    )
    check_parts(AlgorithmConfig(use_kl_loss=True, kl_loss_type="k3+"))
