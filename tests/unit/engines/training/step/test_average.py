"""The moving average of weights: by hand, against torch's own, and a backend that keeps none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.engine_backend import EngineBackend
from engines.training.spec import EngineSpec
from engines.training.step.optimizer_step import (
    decay_of_step,
    move_average,
    start_average,
    take_average,
)
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError


def test_a_sequence_by_hand() -> None:
    weights, average = torch.tensor([8.0, -4.0]), torch.zeros(2)
    start_average([(weights, average)])
    assert average.tolist() == [8, -4]
    course = []
    for values in ([0.0, 4.0], [4.0, 4.0], [-8.0, 0.0]):
        weights.copy_(torch.tensor(values))
        move_average([(weights, average)], 0.75)
        course.append(average.tolist())
    # 0.75 * 8 + 0; 0.75 * 6 + 1; 0.75 * 5.5 - 2. And -3 + 1; -1.5 + 1; -0.375 + 0.
    assert course == [[6.0, -2.0], [5.5, -0.5], [2.125, -0.375]]
    take_average([(weights, average)])
    assert weights.tolist() == [2.125, -0.375]


def test_the_decay_is_warmed_up_by_the_steps_of_the_average() -> None:
    warm, cold = EmaConfig(decay=0.9), EmaConfig(decay=0.9, use_warmup=False)
    assert [decay_of_step(warm, step) for step in (1, 2, 10)] == [2 / 11, 3 / 12, 11 / 20]
    # (1 + t) / (10 + t) reaches 0.9 at t = 80.
    assert decay_of_step(warm, 79) == pytest.approx(80 / 89)
    assert [decay_of_step(warm, step) for step in (80, 81, 10_000)] == [0.9] * 3
    assert decay_of_step(cold, 1) == 0.9


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_it_is_torchs_own(decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    torchs.update_parameters(model)  # the first one is copied
    averaged = [(p.detach(), p.detach().clone()) for p in model.parameters()]
    for _ in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        torchs.update_parameters(model)
        move_average(averaged, decay)
    for (_, own), other in zip(averaged, torchs.module.parameters(), strict=True):
        torch.testing.assert_close(own, other.detach(), rtol=0, atol=1e-7)


def test_backend_without_averaging_refuses_ema_at_construction(
    qwen3_dir: Path,
) -> None:
    class WithoutAverage(FSDP2Engine):
        _averaged = EngineBackend._averaged

    def made(**optimizer: Any) -> FSDP2Engine:
        config = OptimizerConfig.model_validate(optimizer)
        return WithoutAverage(EngineSpec(qwen3_dir, TrainingConfig(), config, 1, CPUPlatform(), 0))

    made()
    with pytest.raises(ConfigError, match=r"optimizer.ema: got one; fsdp2 keeps no average"):
        made(ema={})
