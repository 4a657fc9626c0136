"""The number of a judgement: as a judge writes it, or none where a reader could take it for two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.judges.judgement import judge_score, last_rating
from engines.rewards.base import ScoreRequest


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("7", 7.0),
        ("Score: 7.", 7.0),
        ("Score: 7/10", 7.0),
        ("Score: 7.5 / 10.", 7.5),
        ("**7**/10", 7.0),
        ("$7$/10", 7.0),
        (r"\boxed{7}/10", 7.0),
        ("I rate this 3 out of 10.", 3.0),
        ("3 of 5 stars", 3.0),
        ("9 of the 10 points", 9.0),
        ("3 out of the 5 criteria are met", 3.0),
        ("8 out of a maximum of 10", 8.0),
        ("7 out of a total of 10 possible points", 7.0),
        ("first 3/10, then 8/10", 8.0),
        ("1e-3", 0.001),
        ("2.5E+2 points", 250.0),
        ("1,000", 1000.0),
        ("-1,234,567.5", -1_234_567.5),
        ("Score: -1", -1.0),
        ("Score: \u22121", -1.0),
        ("Score: +2", 2.0),
        ("about .5", 0.5),
        ("Score:-2", -2.0),
        ("x-5", 5.0),
        ("Rating \u2013 4", 4.0),
        ("at first 3, then -2.5", -2.5),
        ("4-5 at first, but 3", 3.0),
        ("_7_", 7.0),
        ("[[7]]", 7.0),
        ("GPT4 earns 6; so do models like v2", 6.0),
        ("80%", 80.0),
        ("a score of 7", 7.0),
        ("Out of 10, I give 7", 7.0),
        ("7 on a scale of 1 to 10", 7.0),
        ("I give 7 (on a scale from 0-10).", 7.0),
        ("On this scale, I give 7", 7.0),
        ("- clarity: 3\n- 5 overall", 5.0),
    ],
)
def test_a_number_is_read_as_it_is_written(written: str, number: float) -> None:
    assert last_rating(written) == number


@pytest.mark.parametrize(
    "written",
    [
        "",
        "no number",
        "Rating: 4-5",
        "Rating: 4 - 5.",
        "4\u20135",
        "4\u20145",
        "4 to 5",
        "from 0.5 to 1",
        "**4**-**5**",
        "4-5/10",
        "2026-11-27",
        "seven/10",
        "seven out of 10",
        "seven out of a possible 10",
        "4\u20115",
        "Seven of 10",
        "a scale of 1 to 10",
        "seven of ten, out of 10",
        "7,5",
        "7,5/10",
        "1,0000",
        "7, then 4-5",
        "7/10/2026",
    ],
)
def test_what_could_be_two_numbers_or_none_is_unread(written: str) -> None:
    assert last_rating(written) is None
    with pytest.raises(ValueError, match="the judge wrote"):
        judge_score(ScoreRequest("s", "a", "g", judgement=written))


WHOLES = ["/", " / ", " out of ", " of ", " out of a possible ", " of the ", " out of at most "]


@given(st.integers(0, 10), st.integers(1, 100), st.sampled_from(WHOLES))
def test_a_whole_is_never_the_rating(part: int, whole: int, between: str) -> None:
    assert last_rating(f"Score: {part}{between}{whole}.") == part


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_that_python_writes_comes_back(number: float) -> None:
    assert last_rating(f"Score: {number!r}") == number


@given(st.text(alphabet="0123456789+-\u2212\u2013,./eE *_$)}]outf", max_size=40))
def test_any_text_is_read_or_not(written: str) -> None:
    last_rating(written)


def test_a_pattern_of_the_recipe_says_where_the_number_stands() -> None:
    sample = ScoreRequest("s", "a", "g", judgement="Score: 4-5, so (4)")
    assert judge_score(sample, pattern=r"Score: (\d)") == {"score": 4.0, "acc": 1.0}
