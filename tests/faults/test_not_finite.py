"""A number that is not finite, on one rank of two, in each of the places it may come from."""

from collections.abc import Callable
from pathlib import Path

import pytest
from not_finite_run import SPOILED, results


@pytest.mark.slow
def test_fault_row_11_nan_or_inf_stops_all_ranks_before_the_step(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for seen in results(tmp_path):
        assert [line.partition(":")[0] for line in seen["stopped"]] == [
            f"{value} {place} {rank}" for value, place, rank in SPOILED
        ]
        assert seen["num_steps"] == 1
        assert seen["unchanged"]
        assert seen["saved"] == ["step-00000001"]
        assert seen["goes_on"] == 2
    record_property("F6", len(SPOILED))
