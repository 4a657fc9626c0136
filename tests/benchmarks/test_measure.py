"""What the lines of a benchmark say, by hand."""

from measure import Measurement, cost_line, ratio_line, turn_by_turn

DISTURBED = Measurement((0.70, 0.72, 0.71, 0.69, 0.74, 1.40, 0.73))


def test_a_disturbed_turn_hides_no_miss_and_makes_none() -> None:
    assert DISTURBED.interval == (0.70, 0.74)
    assert ratio_line("a / b", DISTURBED, 1.0) == (
        "  a / b: ratio 0.72 (0.70 to 0.74, 7 turns); goal 1: MISSED"
    )
    assert ratio_line("a / b", DISTURBED, 0.72).endswith("goal 0.72: reached")
    assert ratio_line("a / b", DISTURBED, 0.73).endswith("0.73: open, it lies within the interval")
    assert cost_line("share", DISTURBED, 0.5) == (
        "  share: 0.72 (0.7 to 0.74, 7 turns); goal at most 0.5: MISSED"
    )
    assert cost_line("share", DISTURBED, 0.71).endswith("0.71: open, it lies within the interval")


def test_few_turns_count_whole() -> None:
    assert Measurement((3.0, 1.0, 2.0)).interval == (1.0, 3.0)
    assert ratio_line("bytes", Measurement((1.6,)), 1.0) == "  bytes: ratio 1.60; goal 1: reached"


def test_a_ratio_is_taken_within_each_turn() -> None:
    slow = turn_by_turn(Measurement((2.0, 20.0)), Measurement((1.0, 10.0)))
    assert slow.values == (2.0, 2.0)
