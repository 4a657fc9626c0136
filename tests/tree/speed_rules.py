"""Which lines of a test hang on the speed of the machine.

Promises: names asserts that bound from above what the same function, or one of the same file that
it calls, read from a clock; and sleeps of a fixed length in the body of a test. A bound of at least
`MIN_HANG_GUARD_S` on a clock on the wall only guards against hanging; processor's time may only be
compared with processor's time. Does not promise more than `clock_readings` does.
"""

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise

from clock_readings import (
    Function,
    Names,
    Reading,
    called,
    names_in,
    names_of,
    number_of,
    outermost,
    reading_of,
)

MIN_HANG_GUARD_S = 60.0
"""At least ten times what anything so guarded takes on a slow and busy machine."""


def findings(source: str) -> list[tuple[int, str]]:
    """Lines of a file that depend on speed: their numbers and what is wrong, sorted."""
    tree = ast.parse(source)
    names, found = names_of(tree), set[tuple[int, str]]()
    for node in outermost(tree):
        own = names_in(node, names)
        asserts = (each for each in ast.walk(node) if isinstance(each, ast.Assert))
        found |= {(each.lineno, "asserts a time") for each in asserts if is_bounded(each.test, own)}
        if node.name.startswith("test_"):
            found |= {(line, f"{node.name} sleeps") for line in sleeps(node.body, own)}
    return sorted(found)


def is_bounded(test: ast.expr, names: Names) -> bool:
    """Whether a condition bounds a time from above otherwise than against hanging."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, (left, right) in zip(node.ops, pairwise(sides), strict=True):
                if isinstance(op, ast.Lt | ast.LtE) and not is_allowed(left, right, names):
                    return True
                if isinstance(op, ast.Gt | ast.GtE) and not is_allowed(right, left, names):
                    return True
    return False


def is_allowed(less: ast.expr, more: ast.expr, names: Names) -> bool:
    """Whether `less < more` says nothing about speed."""
    time, bound = reading_of(less, names), reading_of(more, names)
    if time is None or (time.is_point and isinstance(less, ast.Name)):
        return True  # what comes after something that is past is bounded from below
    if bound is not None and not time.is_point:
        return time.is_cpu and bound.is_cpu and not bound.is_point  # growth
    if bound is not None:  # two points in time: the order of events, or a deadline
        later_s = bound.later_s
        return later_s is not None and (later_s <= 0 or is_guard(time, later_s))
    number = number_of(more, names.numbers)
    return number is not None and time.per_s is not None and is_guard(time, number / time.per_s)


def is_guard(time: Reading, bound_s: float) -> bool:
    return not time.is_cpu and bound_s >= MIN_HANG_GUARD_S


def sleeps(body: Iterable[ast.stmt], names: Names) -> Iterator[int]:
    """Lines that wait for a fixed time, outside of loops that wait for something to happen."""
    for statement in body:
        if isinstance(statement, ast.While | ast.ClassDef | Function) or raises(statement):
            continue
        if isinstance(statement, ast.Expr):
            value = statement.value.value if isinstance(statement.value, ast.Await) else None
            call = value or statement.value
            if called(call, names) in {"time.sleep", "asyncio.sleep"} and lasts(call):
                yield statement.lineno
        for name in ("body", "orelse", "finalbody", "handlers"):
            yield from sleeps(getattr(statement, name, ()), names)


def raises(statement: ast.stmt) -> bool:
    """Whether it is a `with pytest.raises(...)`, whose body ends by an exception."""
    items = statement.items if isinstance(statement, ast.With | ast.AsyncWith) else []
    calls = [each.context_expr for each in items]
    return any(isinstance(c, ast.Call) and ast.unparse(c.func) == "pytest.raises" for c in calls)


def lasts(call: ast.expr) -> bool:
    """Whether a sleep is more than a turn for others."""
    return isinstance(call, ast.Call) and number_of(call.args[0], {}) != 0
