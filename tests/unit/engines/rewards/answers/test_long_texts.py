"""Texts of 100,000 characters that make a careless pattern go back and forth: read at once."""

import time
from collections.abc import Callable, Mapping

import pytest

from engines.rewards import exact
from engines.rewards.answers import gsm8k, math_boxed, math_dapo
from engines.rewards.answers.extraction import EXTRACTIONS
from engines.rewards.form import format as form
from engines.rewards.judges.judgement import last_rating

LENGTH = 100_000
PARTS = [
    "{", "}", "\\", "\\boxed{", "\\boxed ", "\\fbox", "\\frac", "\\sqrt", "\\text{ ", "answer",
    "answer :\n", " ", "\n", "-", "1", "1,", "1,234", ".", "#### ", "=", "$", "<think>",
    "1-", "1/", "1 to ", "1 of ", "scale 1", "1)", "/(", "1e",
]  # fmt: skip
REPEATED = [part * (LENGTH // len(part)) for part in PARTS]
TEXTS = [
    *REPEATED,
    *(f"\\boxed{{{text}}}" for text in REPEATED),
    *(f"{start}{gap * LENGTH}" for start in ("answer", "answer:", "\\boxed") for gap in " \n"),
]
READERS: Mapping[str, Callable[[str], object]] = {
    **EXTRACTIONS,
    "gsm8k": lambda text: gsm8k.compute_score("d", text, "5"),
    "gsm8k, flexible": lambda text: gsm8k.compute_score("d", text, "5", method="flexible"),
    "math_boxed": lambda text: math_boxed.compute_score("d", text, "5"),
    "math_dapo": lambda text: math_dapo.compute_score("d", text, "5"),
    "math_dapo, boxed": lambda text: math_dapo.compute_score(
        "d", text, "5", strict_box_verify=True
    ),
    "exact": lambda text: exact.compute_score("d", text, "5"),
    "judge": last_rating,
    "format": lambda text: form.compute_score("d", text, "5"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_long_text_is_read_at_once(reader: str) -> None:
    for text in TEXTS:
        started = time.process_time()
        READERS[reader](text)
        assert time.process_time() - started < 1, text[:20]
