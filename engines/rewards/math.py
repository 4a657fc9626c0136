"""Reward `math`: 1 if the final answer equals the ground truth as mathematics, else 0.

Parsing and comparison are math-verify's (LaTeX, plain expressions, sets, intervals, matrices); a
boxed answer comes before any other. Its own time limits are off, since they go by the clock, which
a busy machine changes.
Promises: once the ground truth is read, an answer that cannot be compared with it for its size (a
number of more than 100,000 digits in another writing, memory, depth) or within `max_cpu_s` of
processor time is wrong, and not unscored: the policy wrote it.
Not promised: that a clever wrong text is never taken for right; equality is undecidable.
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

# It warns once per process that its time limits are off, which is what we want.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_NUM_DIGITS = 100_000
"""A longer number is compared as it is written."""


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
    """Compare the completion's final answer with the ground truth.

    Args:
        data_source: not used.
        solution_str: the completion; without an answer that can be parsed it earns 0.
        ground_truth: LaTeX or a plain expression, with or without `\\boxed{}`.
        extra_info: not used.
        extraction: where the answer stands: in a box, behind `####`, behind `Answer:`, the last
            number; `any` takes a box before anything else that can be parsed.
        num_decimals: decimals to which two floating-point numbers must agree.
        max_cpu_s: processor time for reading and comparing the answer, in seconds.

    Returns:
        The score, 1.0 or 0.0; `pred`, the answer as MATH writes it: equal mathematics in other
        forms has another.

    Raises:
        ValueError: the ground truth cannot be parsed.
        Exception: what a comparison raised, when no other comparison found the answer right.
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
    """Whether a reading of the truth equals one of the answer.

    Args:
        truths: readings of the ground truth.
        answers: readings of the answer.
        num_decimals: see `compute_score`.

    Returns:
        False as well where there is nothing to compare.

    Raises:
        Exception: what a comparison raised, when no other one found them equal.
    """
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
    """Without those that would have to be written out to be compared, and are too long for it."""
    return [each for each in readings if max_num_digits(each) <= _MAX_NUM_DIGITS]


def _answers(solution_str: str, extraction: Extraction) -> list[Any]:
    """What the completion answers, parsed; empty where there is nothing."""
    if extraction == "any":
        return _parse(solution_str)
    found = EXTRACTIONS[extraction](solution_str)
    return _parse_answer(found.strip()) if found and found.strip() else []


def _text(answers: list[Any]) -> str | None:
    """What was parsed, as text; the parser hands it on behind what it made of it."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    return math_form(texts[-1]) if texts else None


def _parse_ground_truth(ground_truth: object) -> list[Any]:
    text = truth_text(ground_truth)
    parsed = _parse_answer(text)
    if not parsed:
        raise ValueError(f"the ground truth {text[:80]!r} cannot be parsed")
    return parsed


def _parse_answer(text: str) -> list[Any]:
    """Parse a text that is nothing but an answer."""
    boxed = text if "\\boxed" in text else f"\\boxed{{{text}}}"
    forms = dict.fromkeys((boxed, text))
    return next((parsed for parsed in map(_parse, forms) if parsed), [])


def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]
