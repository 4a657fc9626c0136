"""Reward `math`: 1 if the final answer equals the ground truth as mathematics, else 0.

math-verify parses and compares. Its time limits use wall time, which depends on the machine's load,
and are off. If the ground truth can be read, an answer that is too large to compare (a number of
more than 100,000 digits, memory, depth) or needs more than `max_cpu_s` is wrong, not unscored.
Does not promise that no wrong text is accepted: equality is undecidable.
"""

import logging
from collections.abc import Mapping
from itertools import product
from typing import Any

from math_verify import parse, verify

from engines.rewards.answers.extraction import ANSWER, EXTRACTIONS, Extraction, truth_text
from engines.rewards.answers.normal_forms import math_form
from engines.rewards.answers.size import max_num_digits
from engines.rewards.cpu_limit import CpuLimitError, cpu_limit

# It warns once per process that its time limits are off, which is intended.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_NUM_DIGITS = 100_000
"""Longer numbers are not evaluated for a comparison."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    extraction: Extraction = "any",
    num_decimals: int = 6,
    max_cpu_s: float = 3.0,
) -> dict[str, Any]:
    """Return `score`, 1.0 or 0.0, and `pred`, the answer in MATH's normal form.

    `ground_truth` is LaTeX or a plain expression, boxed or not. Options: see `MathOptions`.

    Raises:
        ValueError: the ground truth cannot be parsed.
        Exception: a comparison failed, and no other one found the answer right.
    """
    truths = _parse_ground_truth(ground_truth)
    answers: list[Any] = []
    try:
        with cpu_limit(max_cpu_s):
            answers = _answers(solution_str, extraction)
            right = _is_right(truths, answers, num_decimals)
    except (CpuLimitError, MemoryError, RecursionError, OverflowError):
        right = False
    return {"score": float(right), ANSWER: _text(answers)}


def _is_right(truths: list[Any], answers: list[Any], num_decimals: int) -> bool:
    """Return True if a reading of the truth equals one of the answer; see `compute_score`."""
    failure: Exception | None = None
    for truth, answer in product(*map(_comparable, (truths, answers))):
        try:
            right = verify(
                truth,
                answer,
                float_rounding=num_decimals,
                timeout_seconds=None,
                raise_on_error=True,
            )
        except Exception as error:  # noqa: BLE001 - sympy raises anything; raised again below
            failure = error
            continue
        if right:
            return True
    if failure is not None:
        raise failure
    return False


def _comparable(readings: list[Any]) -> list[Any]:
    """Drop readings that are too long to be evaluated for a comparison."""
    return [each for each in readings if max_num_digits(each) <= _MAX_NUM_DIGITS]


def _answers(solution_str: str, extraction: Extraction) -> list[Any]:
    if extraction == "any":
        return _parse(solution_str)
    found = EXTRACTIONS[extraction](solution_str)
    return _parse_answer(found.strip()) if found and found.strip() else []


def _text(answers: list[Any]) -> str | None:
    """Return the text of the answer; the parser puts it behind the parsed expression."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    return math_form(texts[-1]) if texts else None


def _parse_ground_truth(ground_truth: object) -> list[Any]:
    text = truth_text(ground_truth)
    parsed = _parse_answer(text)
    if not parsed:
        raise ValueError(f"the ground truth {text[:80]!r} cannot be parsed")
    return parsed


def _parse_answer(text: str) -> list[Any]:
    """Parse a text that consists of an answer only."""
    boxed = text if "\\boxed" in text else f"\\boxed{{{text}}}"
    forms = dict.fromkeys((boxed, text))
    return next((parsed for parsed in map(_parse, forms) if parsed), [])


def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]
