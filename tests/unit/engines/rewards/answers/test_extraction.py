r"""Where an answer stands, on texts whose answer is plain to see."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.rewards.text_rules import (
    EXTRACTIONS,
    after_answer,
    after_hash,
    boxed,
    last_number,
    truth_text,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{4}", "4"),
        (r"first \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\fbox{7}", "7"),
        (r"\boxed{4} as in \fbox{7}", "4"),
        (r"it is $\boxed 5$.", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{4", None),
        (r"\boxed{3} then \boxed{4", None),
        (r"\boxed{4\}", None),
        ("4", None),
        ("", None),
    ],
)
def test_boxes(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 1\n#### 1,234 eggs\nbye", "1,234 eggs"),
        ("####7", "7"),
        ("####", None),
        ("#### \nnothing", None),
        ("72", None),
    ],
)
def test_hashes(text: str, answer: str | None) -> None:
    assert after_hash(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 5", "5"),
        ("ANSWER :  x = 5 \nbye", "x = 5"),
        ("Answer: 4\nno\nanswer: $5$", "$5$"),
        ("Answer:\n5", "5"),
        ("The answer is 5", None),
        ("Answer:", None),
    ],
)
def test_answer_lines(text: str, answer: str | None) -> None:
    assert after_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 and 4.", "4"),
        ("costs $1,234.50.", "1,234.50"),
        ("1,2", "2"),
        ("-5 degrees", "-5"),
        ("about .5", ".5"),
        ("10-5", "5"),
        ("3-5 = -2", "-2"),
        ("x^2-4", "4"),
        ("(x)-4", "4"),
        ("$-4$", "-4"),
        ("...", None),
        ("none", None),
    ],
)
def test_last_numbers(text: str, answer: str | None) -> None:
    assert last_number(text) == answer


@given(st.text(alphabet=st.sampled_from("{}\\ab 1"), max_size=30), st.text(max_size=30))
def test_a_balanced_box_gives_its_content_back(content: str, before: str) -> None:
    # Balanced: each brace closes what is open, and none is behind a backslash.
    plain = content.replace("\\", "")
    depth, balanced = 0, True
    for character in plain:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert boxed(f"{before} \\boxed{{{plain}}} end }}") == plain


@given(st.text(alphabet=st.sampled_from("\\boxed{}fAnswer:# \n$-.,0123456789"), max_size=80))
def test_any_text_is_taken_and_an_answer_is_a_part_of_it(text: str) -> None:
    for extract in EXTRACTIONS.values():
        found = extract(text)
        assert found is None or found in text


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-999, max_value=999))
def test_a_number_at_the_end_is_the_last_number(number: object) -> None:
    assert last_number(f"12 and then {number}") == str(number)


@pytest.mark.parametrize("truth", [None, "", " \n", True, ["1"], {"a": 1}])
def test_a_ground_truth_that_is_none_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="the ground truth is"):
        truth_text(truth)
