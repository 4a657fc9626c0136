"""What a step adds up over ranks, and which of them spoiled it."""

import pytest
import torch

from engines import collectives
from engines.training.step.micro_batches import Totals
from engines.types import LossOutput


def test_ranks_whose_own_loss_is_no_finite_number_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three more ranks: what they send is put in, for this process is alone."""
    alone = collectives.gather_rows

    def gather(values, *place):
        (own,) = alone(values, *place)
        return [own, [float("nan"), 1.0], [2.0, 1.0], [float("inf"), 1.0]]

    def reduced(loss: float) -> tuple[float, dict[str, float], list[int]]:
        totals = Totals(torch.device("cpu"))
        totals.add(LossOutput(torch.tensor(loss), {"m": torch.tensor(1.0)}, {}))
        return totals.reduce(None)

    assert reduced(2.0) == (2.0, {"m": 1.0}, [])
    assert reduced(float("nan"))[2] == [0]
    monkeypatch.setattr(collectives, "gather_rows", gather)
    loss, metrics, spoiled = reduced(2.0)
    assert loss != loss
    assert (metrics, spoiled) == ({"m": 4.0}, [1, 3])
