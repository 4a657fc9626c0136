"""What expressions of a file owe to a clock, as far as its syntax tree tells.

Promises: times are followed through names, sums, differences and factors, lists, and functions of
the same file that return them. Does not promise: to follow them into attributes, other containers
and other files.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

WALL = ("monotonic", "time", "perf_counter")
CPU = ("process_time", "thread_time")
CLOCKS = {f"{name}{unit}" for name in (*WALL, *CPU) for unit in ("", "_ns")}
PASSED_ON = {"min", "max", "sum", "abs", "round", "float", "int", "sorted"}
"""Functions whose result is a time if what they are given is one."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Reading:
    """A number that came from a clock.

    Attributes:
        is_cpu: the clock counts the processor's time.
        is_point: a point in time; else what passed between two.
        later_s: what was added to a point in time; None if that is unknown.
        per_s: how much of the number is a second; None if that is unknown.
    """

    is_cpu: bool
    is_point: bool = True
    later_s: float | None = 0.0
    per_s: float | None = 1.0


@dataclass
class Names:
    """What names of a file, and of one of its functions, stand for."""

    clocks: dict[str, str] = field(default_factory=dict)
    """`time.monotonic` by `monotonic`, and so on; of modules, the same name by itself."""
    numbers: dict[str, float] = field(default_factory=dict)
    readings: dict[str, Reading] = field(default_factory=dict)
    returned: dict[str, Reading] = field(default_factory=dict)
    """By the function of the file that returns them."""


def outermost(tree: ast.AST) -> Iterator[Function]:
    """Functions that are in no other one; those within them belong to them."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Function):
            yield child
        else:
            yield from outermost(child)


def names_of(tree: ast.Module) -> Names:
    """Clocks and numbers of a file, and which of its functions return times."""
    names = Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.clocks |= {(a.asname or a.name): a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.clocks |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    for statement in tree.body:
        for target, value in assigned(statement):
            number = number_of(value, names.numbers)
            if number is not None:
                names.numbers[target] = number
    for node in outermost(tree):
        own = names_in(node, names)
        results = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        readings = [reading_of(each, own) for each in results if each is not None]
        for reading in filter(None, readings):
            names.returned[node.name] = reading
    return names


def names_in(node: Function, names: Names) -> Names:
    """The same, and what the function itself names: arguments' defaults, and times."""
    own = Names(names.clocks, dict(names.numbers), {}, names.returned)
    arguments = node.args.posonlyargs + node.args.args
    defaults = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
    given = [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    for argument, default in given:
        number = None if default is None else number_of(default, names.numbers)
        if number is not None:
            own.numbers[argument.arg] = number
    for _ in range(2):  # a name may be used above the line that gives it a value
        for each in ast.walk(node):
            for target, value in assigned(each):
                reading, number = reading_of(value, own), number_of(value, own.numbers)
                own.readings |= {} if reading is None else {target: reading}
                own.numbers |= {} if number is None else {target: number}
    return own


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that a node gives values, or adds them to as to a list."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs: Iterable[tuple[ast.expr, ast.expr]] = zip(targets, values, strict=False)
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
        ):
            pairs = [(target, value)]
        case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
            pairs = [(target, value)]
        case _:
            return
    for target, value in pairs:
        target = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(target, ast.Name):
            yield target.id, value


def number_of(node: ast.expr, numbers: Mapping[str, float]) -> float | None:
    """The number that an expression is, as far as it can be told."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return numbers.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            one, other = number_of(left, numbers), number_of(right, numbers)
            if one is None or other is None:
                return None
            if isinstance(op, ast.Add | ast.Sub):
                return one + other if isinstance(op, ast.Add) else one - other
            if isinstance(op, ast.Mult):
                return one * other
            return one / other if isinstance(op, ast.Div) and other else None
    return None


def called(node: ast.expr, names: Names) -> str:
    """`time.monotonic` of a call of it, by whatever name; empty if it is none."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return names.clocks.get(name, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
            return f"{names.clocks.get(module, module)}.{name}"
    return ""


def reading_of(node: ast.expr, names: Names) -> Reading | None:
    """What an expression owes to a clock; None if it owes nothing to it."""
    module, _, clock = called(node, names).rpartition(".")
    if module == "time" and clock in CLOCKS:
        per_s = 1e9 if clock.endswith("_ns") else 1.0
        return Reading(clock.removesuffix("_ns") in CPU, per_s=per_s)
    match node:
        case ast.Name(id=name):
            return names.readings.get(name)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            passed_on = arguments if name in PASSED_ON else []
            return names.returned.get(name) or first(passed_on, names)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return first(parts, names)
        case ast.Subscript(value=part) | ast.ListComp(elt=part) | ast.GeneratorExp(elt=part):
            return reading_of(part, names)
        case ast.BinOp(left=left, op=op, right=right):
            return combined(left, op, right, names)
    return None


def first(parts: Iterable[ast.expr], names: Names) -> Reading | None:
    readings = (reading_of(part, names) for part in parts)
    return next((each for each in readings if each is not None), None)


def combined(left: ast.expr, op: ast.operator, right: ast.expr, names: Names) -> Reading | None:
    """Of two expressions, at least one of which may be a time."""
    one, other = reading_of(left, names), reading_of(right, names)
    reading = one or other
    if reading is None:
        return None
    if one is not None and other is not None:
        return replace(one, is_point=False) if isinstance(op, ast.Sub) else one
    number = number_of(right if one is not None else left, names.numbers)
    if isinstance(op, ast.Mult | ast.Div | ast.FloorDiv):
        factor = 1 / number if number and not isinstance(op, ast.Mult) else number
        return replace(reading, per_s=reading.per_s * factor if reading.per_s and factor else None)
    if number is None or reading.later_s is None:
        return replace(reading, later_s=None)
    return replace(
        reading, later_s=reading.later_s + (-number if isinstance(op, ast.Sub) else number)
    )
