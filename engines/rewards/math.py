"""Reward `math`: 1 if the final answer equals the ground truth as mathematics, else 0.

math-verify parses and compares. Its time limits use wall time, which depends on the machine's load,
and are off; `cpu_limit` limits the processor time instead. If the ground truth can be read, an
answer that is too large to compare (a number of more than 100,000 digits, memory, depth) or needs
more than `max_cpu_s` is wrong, not unscored. `max_num_digits` bounds an answer's length without
evaluating it.
Does not promise: that no wrong text is accepted, since equality is undecidable; a bound for roots,
sums, integrals and other expensive operations; an interrupt of a single C call that checks no
signals, or of code outside the main thread, where the sample's deadline applies.
"""

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from types import FrameType
from typing import Any

from math_verify import parse, verify
from sympy import Basic, Pow, Product, Rational, binomial, factorial, factorial2, subfactorial

from engines.rewards.base import ANSWER
from engines.rewards.text_rules import (
    EXTRACTIONS,
    Extraction,
    math_form,
    truth_text,
)

_MAX_LOG10 = 300.0
"""A multiplier with more digits counts as infinite."""


def max_num_digits(expression: Any) -> float:
    """Return an upper bound on the decimal digits of an unevaluated expression and its exponents.

    Counts numerator and denominator; 0 for symbols, constants, 0, 1, -1; infinite for 9^9^9^9.
    """
    match expression:
        case Rational():
            return _log10(int(expression.p)) + _log10(int(expression.q))
        case Pow():
            base, exponent = map(max_num_digits, expression.args)
            return max(_times(base, _value(exponent)), exponent)
        case binomial():
            largest, taken = map(max_num_digits, expression.args)
            # n over k is at most n^k and at most 2^n.
            digits = min(_times(largest, _value(taken)), _times(math.log10(2), _value(largest)))
            return max(digits, largest, taken)
        case factorial() | factorial2() | subfactorial():
            [digits] = map(max_num_digits, expression.args)
            return _times(digits, _value(digits))
        case Product():
            factor, *ranges = expression.args
            ends = [max_num_digits(end) for each in ranges for end in each.args[1:]]
            return _times(max_num_digits(factor) + sum(ends), sum(map(_value, ends)))
    if isinstance(expression, Basic):
        return sum(map(max_num_digits, expression.args))
    entries = () if isinstance(expression, str) else getattr(expression, "flat", tuple)()
    return sum(map(max_num_digits, entries))


def _log10(number: int) -> float:
    return math.log10(abs(number)) if number else 0.0


def _value(num_digits: float) -> float:
    return 10**num_digits if num_digits < _MAX_LOG10 else math.inf


def _times(digits: float, times: float) -> float:
    """Multiply, with 0 for zero times infinity."""
    return digits * times if digits else 0.0


_REPEAT_S = 0.5
"""Interval at which `CpuLimitError` is raised again, in case it was swallowed."""


class CpuLimitError(BaseException):
    """The processor time is used up; a BaseException, which `except Exception` does not catch."""


@contextlib.contextmanager
def cpu_limit(max_cpu_s: float) -> Iterator[None]:
    """In the main thread, raise CpuLimitError in the body after `max_cpu_s` s of CPU time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_running = True

    def end(_signal: int, _frame: FrameType | None) -> None:
        if is_running:
            raise CpuLimitError

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s, _REPEAT_S)
        yield
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
        Exception: a comparison failed, and no other comparison found the answer right.
    """
    text = truth_text(ground_truth)
    truths = _parse_answer(text)
    if not truths:
        raise ValueError(f"the ground truth {text[:80]!r} cannot be parsed")
    answers: list[Any] = []
    try:
        with cpu_limit(max_cpu_s):
            answers = _answers(solution_str, extraction)
            right = _is_right(truths, answers, num_decimals)
    except (CpuLimitError, MemoryError, RecursionError, OverflowError):
        right = False
    # The parser puts the text of an answer after the parsed expression.
    texts = [answer for answer in answers if isinstance(answer, str)]
    return {"score": float(right), ANSWER: math_form(texts[-1]) if texts else None}


def _is_right(truths: list[Any], answers: list[Any], num_decimals: int) -> bool:
    """Return True if a reading of the truth equals one of the answer; see `compute_score`."""
    failure: Exception | None = None
    # Readings that are too long are not evaluated for a comparison.
    short = (
        [r for r in each if max_num_digits(r) <= _MAX_NUM_DIGITS] for each in (truths, answers)
    )
    for truth, answer in product(*short):
        try:
            if verify(
                truth,
                answer,
                float_rounding=num_decimals,
                timeout_seconds=None,
                raise_on_error=True,
            ):
                return True
        except Exception as error:  # noqa: BLE001 - sympy raises anything; raised again below
            failure = error
    if failure is not None:
        raise failure
    return False


def _answers(solution_str: str, extraction: Extraction) -> list[Any]:
    if extraction == "any":
        return _parse(solution_str)
    found = (EXTRACTIONS[extraction](solution_str) or "").strip()
    return _parse_answer(found) if found else []


def _parse_answer(text: str) -> list[Any]:
    """Parse a text that consists of an answer only."""
    return _parse(text if "\\boxed" in text else f"\\boxed{{{text}}}") or _parse(text)


def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]
