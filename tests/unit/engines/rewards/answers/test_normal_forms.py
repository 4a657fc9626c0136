r"""Forms of answers against tables that were worked out by hand from the published rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.rewards.text_rules import math_form, minerva_form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\dfrac{3}{4}", r"\frac{3}{4}"),
        (r"\tfrac{3}{4}", r"\frac{3}{4}"),
        ("3/4", r"\frac{3}{4}"),
        ("-3/4", r"\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("a/b", "a/b"),
        ("0.5", r"\frac{1}{2}"),
        (".5", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 5", "5"),
        ("x+y = 5", "x+y=5"),
        ("a=b=c", "a=b=c"),
        (r"50\%", "50"),
        ("50%", "50%"),
        (r"\$18", "18"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ cm} and 6\text{ cm}", r"5\text{ cm} and 6\text{ cm}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("10\\!\n000", "10000"),
        ("", ""),
        (r"\sqrt", r"\sqrt"),
        (r"\frac", r"\frac"),
    ],
)
def test_forms_of_math(text: str, form: str) -> None:
    assert math_form(text) == form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("5", "5"),
        ("1,234", "1234"),
        ("1,2", "12"),
        ("x = 5", "5"),
        ("5 dollars", "5"),
        (r"\$5", "5"),
        ("$5$", "5"),
        ("so $5$ it is", "5"),
        (r"\boxed{5}", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"90^\circ", "90"),
        ("an apple", "apple"),
        (r"5\text{ cm}", "5"),
        ("5.", "5."),
        ("", ""),
    ],
)
def test_forms_of_minerva(text: str, form: str) -> None:
    assert minerva_form(text) == form


@given(st.text(alphabet=st.sampled_from("\\frac{}sqrt 12./=$^text"), max_size=60))
def test_any_text_has_a_form(text: str) -> None:
    for form in (math_form, minerva_form):
        assert isinstance(form(text), str)


@given(st.integers(-10_000, 10_000), st.integers(1, 10_000))
def test_spellings_of_a_fraction_have_one_form(a: int, b: int) -> None:
    forms = {math_form(text) for text in (f"{a}/{b}", rf"\dfrac{{{a}}}{{{b}}}", f" {a} / {b} ")}
    assert forms == {rf"\frac{{{a}}}{{{b}}}"}
