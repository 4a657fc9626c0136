"""Every row of the fault matrix has a test, and every figure is one that a row asks for."""

from fault_matrix import BAD_INPUT, ROWS, proofs
from figures import FIGURES, Figure

REQUIRED = {*range(1, 11), *range(16, 29)}


def test_every_row_has_a_test() -> None:
    assert set(ROWS) >= REQUIRED
    assert set(proofs()) == set(ROWS), "each row has a test, and each test a row"


def test_every_bad_input_has_a_test() -> None:
    assert set(proofs(BAD_INPUT)) == {30, *range(34, 48)}


def test_figures_are_those_of_rows() -> None:
    asked = {name for row in ROWS.values() for name in row.figures}
    assert asked == set(FIGURES) - {"F12"}, "a secret is no fault"


def test_a_figure_is_a_sum_or_a_bound() -> None:
    kills, seconds = Figure("kills", 3), Figure("seconds", at_most=5)
    assert (kills.total([1, 1]), kills.holds(2), kills.holds(3)) == (2, False, True)
    assert (seconds.total([1, 6]), seconds.holds(6), seconds.holds(5)) == (6, False, True)
    assert kills.total([]) is None
    assert not seconds.holds(None)
    assert seconds.line("F4", 6).endswith("6  (need <= 5)  seconds  NOT HELD")
