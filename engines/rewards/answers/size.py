"""Upper bound on the number of digits of an answer, or of a part of it, if it were written out.

Nothing is evaluated. Roots, sums, integrals and other expensive operations are not bounded.
"""

import math
from typing import Any

from sympy import Basic, Pow, Product, Rational, binomial, factorial, factorial2, subfactorial

_MAX_LOG10 = 300.0
"""A multiplier with more digits counts as infinite."""
_LOG10_2 = math.log10(2)


def max_num_digits(expression: Any) -> float:
    """Bound the decimal digits of the exact value of an unevaluated expression and its exponents.

    Counts numerator and denominator; 0 for symbols, constants, 0, 1 and -1; infinite for a tower.
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
            digits = min(_times(largest, _value(taken)), _times(_LOG10_2, _value(largest)))
            return max(digits, largest, taken)
        case factorial() | factorial2() | subfactorial():
            [digits] = map(max_num_digits, expression.args)
            return _times(digits, _value(digits))
        case Product():
            factor, *ranges = expression.args
            ends = [max_num_digits(end) for each in ranges for end in each.args[1:]]
            return _times(max_num_digits(factor) + sum(ends), sum(map(_value, ends)))
    parts = (
        getattr(expression, "args", ()) if isinstance(expression, Basic) else _entries(expression)
    )
    return sum(map(max_num_digits, parts))


def _entries(expression: Any) -> tuple[Any, ...]:
    return () if isinstance(expression, str) else tuple(getattr(expression, "flat", tuple)())


def _log10(number: int) -> float:
    return math.log10(abs(number)) if number else 0.0


def _value(num_digits: float) -> float:
    return 10**num_digits if num_digits < _MAX_LOG10 else math.inf


def _times(digits: float, times: float) -> float:
    """Multiply, with 0 for zero times infinity."""
    return digits * times if digits else 0.0
