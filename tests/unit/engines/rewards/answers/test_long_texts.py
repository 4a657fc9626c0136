"""Long texts that make a careless pattern go back and forth: reading costs what they are long."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from growth import grows_in_proportion

from engines.judges.judgement import last_rating
from engines.rewards.text_rules import (
    EXTRACTIONS,
    exact,
    gsm8k,
    math_boxed,
    math_dapo,
    required_form,
)

LENGTH = 3_000
"""Of the shorter of two; the other has ten times as many characters."""
PARTS = [
    "{", "}", "\\", "\\boxed{", "\\boxed ", "\\fbox", "\\frac", "\\sqrt", "\\text{ ", "answer",
    "answer :\n", " ", "\n", "-", "1", "1,", "1,234", ".", "#### ", "=", "$", "<think>",
    "1-", "1/", "1 to ", "1 of ", "scale 1", "1)", "/(", "1e",
]  # fmt: skip


def texts(length: int) -> list[str]:
    """Of about so many characters each."""
    repeated = [part * (length // len(part)) for part in PARTS]
    starts = ("answer", "answer:", "\\boxed")
    return [
        *repeated,
        *(f"\\boxed{{{text}}}" for text in repeated),
        *(f"{start}{gap * length}" for start in starts for gap in " \n"),
    ]


READERS: Mapping[str, Callable[[str], object]] = {
    **EXTRACTIONS,
    "gsm8k": lambda text: gsm8k("d", text, "5"),
    "gsm8k, flexible": lambda text: gsm8k("d", text, "5", method="flexible"),
    "math_boxed": lambda text: math_boxed("d", text, "5"),
    "math_dapo": lambda text: math_dapo("d", text, "5"),
    "math_dapo, boxed": lambda text: math_dapo("d", text, "5", strict_box_verify=True),
    "exact": lambda text: exact("d", text, "5"),
    "judge": last_rating,
    "format": lambda text: required_form("d", text, "5"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_text_ten_times_as_long_takes_ten_times_as_long(reader: str) -> None:
    read = READERS[reader]
    for text, longer in zip(texts(LENGTH), texts(10 * LENGTH), strict=True):
        assert grows_in_proportion(partial(read, text), partial(read, longer)), text[:20]
