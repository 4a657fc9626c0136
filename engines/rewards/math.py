"""Reward `math`: 1 if the final answer equals the ground truth as mathematics, else 0.

Parsing and comparison are math-verify's (LaTeX, plain expressions, sets, intervals, matrices); a
boxed answer comes before any other. Its own time limits are off, since they need the main
thread's signals and turn a timeout into "wrong": this function runs in a scoring process, which
is killed at the sample's deadline.
Not promised: that a clever wrong text is never taken for right; equality is undecidable.
"""

import logging
from collections.abc import Mapping
from itertools import product
from typing import Any

from math_verify import parse, verify

from engines.rewards.answers.extraction import ANSWER, EXTRACTIONS, Extraction, truth_text
from engines.rewards.answers.normal_forms import math_form

# It warns once per process that its time limits are off, which is what we want.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    extraction: Extraction = "any",
    num_decimals: int = 6,
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

    Returns:
        The score, 1.0 or 0.0; `pred`, the answer as MATH writes it: equal mathematics in other
        forms has another.

    Raises:
        ValueError: the ground truth cannot be parsed.
        Exception: what a comparison raised, when no other comparison found the answer right.
    """
    truths = _parse_ground_truth(ground_truth)
    answers = _answers(solution_str, extraction)
    failure: Exception | None = None
    for truth, answer in product(truths, answers):
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
            return {"score": 1.0, ANSWER: _text(answers)}
    if failure is not None:
        raise failure
    return {"score": 0.0, ANSWER: _text(answers)}


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
