"""Learning rates by hand."""

import pytest

from engines.config.training import OptimizerConfig
from engines.training.step.optimizer_step import learning_rate


def test_warm_up_then_constant() -> None:
    config = OptimizerConfig(lr=1.0, num_warmup_steps=3)
    rates = [learning_rate(step, config, 10) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_cosine_by_hand() -> None:
    config = OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    rates = [learning_rate(step, config, 4) for step in range(6)]
    # 0.1 + 0.9 * (1 + cos(pi * k / 4)) / 2, times 2
    assert rates == pytest.approx([2.0, 1.7363961, 1.1, 0.4636039, 0.2, 0.2])


def test_warm_up_then_cosine_reaches_the_floor_at_the_end() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", num_warmup_steps=2)
    rates = [learning_rate(step, config, 6) for step in range(7)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[4] == pytest.approx(0.5)
    assert rates[6] == pytest.approx(0.0)


def test_warm_up_longer_than_the_run() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", num_warmup_steps=10)
    assert learning_rate(3, config, 4) == pytest.approx(4 / 11)
    assert learning_rate(10, config, 4) == pytest.approx(1.0)
