"""Converts validation errors to one actionable line: `path.to.field: got X; need Y`.

Promises: the most informative error becomes one `ConfigError`; an unknown key gets a similar known
one or all of them, a bad value gets the field's type and bounds. A validator message that begins
with ``field:`` extends the path.
"""

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from infra.errors import ConfigError

MAX_ECHO_CHARS = 60

_TELLING_FIRST = {"extra_forbidden": 0, "missing": 1}
_BOUND_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_TYPE_WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}


def to_config_error(error: ValidationError, model: type[BaseModel], root: str = "") -> ConfigError:
    """Convert the most informative error to a `ConfigError`; `root` is the path of `model`."""
    found = error.errors(include_url=False)
    first = min(found, key=lambda each: _TELLING_FIRST.get(each["type"], len(_TELLING_FIRST)))
    path = ".".join(filter(None, (root, *(str(part) for part in first["loc"]))))
    owner, field = _resolve(model, first["loc"])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    match first["type"]:
        case "extra_forbidden":
            problem = _unknown_field(str(first["loc"][-1]), owner, model)
        case "missing":
            problem = f"missing; need {(field and field.description) or 'give a value'}"
        case "value_error":
            problem = str(first["ctx"]["error"]) if "ctx" in first else ""
            inner, colon, rest = problem.partition(": ")
            if colon and re.fullmatch(r"[a-z_][a-z0-9_.]*", inner):
                path, problem = f"{path}.{inner}" if path else inner, rest
        case _:
            problem = _bad_value(first, field)
    return ConfigError(path or "recipe", problem + more)


def _unknown_field(name: str, owner: type[BaseModel] | None, root: type[BaseModel]) -> str:
    known = list(owner.model_fields) if owner else []
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"unknown field; did you mean {nearest[0]}?"
    paths = {path.rpartition(".")[2]: path for path in _all_paths(root, "")}
    elsewhere = difflib.get_close_matches(name, paths, n=1, cutoff=0.8)
    if elsewhere:
        return f"unknown field; did you mean {paths[elsewhere[0]]}?"
    return f"unknown field; known: {', '.join(known)}" if known else "unknown field; remove it"


def _all_paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = _model_of(field.annotation)
        if inner:
            yield from _all_paths(inner, f"{prefix}{name}.")


def _bad_value(error: ErrorDetails, field: FieldInfo | None) -> str:
    if field and isinstance(error["loc"][-1], int):
        need = _describe((get_args(field.annotation) or (str,))[0])
    else:
        need = describe_field(field) if field else error["msg"].lower()
    value = error["input"]
    got = f"{value:g}" if isinstance(value, float) else repr(value)
    if isinstance(value, BaseModel | Mapping):
        got = "a mapping"
    elif isinstance(value, list | tuple):
        got = "a list"
    more = "..." if len(got) > MAX_ECHO_CHARS else ""
    return f"got {got[:MAX_ECHO_CHARS]}{more}; need {need}"


def describe_field(field: FieldInfo) -> str:
    """Describe what a field accepts: `an integer >= 1`, `one of cosine, constant`."""
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in _BOUND_SIGNS.items()
        if getattr(rule, name, None) is not None
    ]
    patterns = filter(None, (getattr(rule, "pattern", None) for rule in field.metadata))
    matching = (f"matching {pattern}" for pattern in patterns)
    return " ".join([_describe(field.annotation), " and ".join(bounds), *matching]).strip()


def _describe(annotation: Any) -> str:
    if annotation in _TYPE_WORDS:
        return _TYPE_WORDS[annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if origin in {Union, types.UnionType}:
        return " or ".join(
            "null" if part is type(None) else _describe(part) for part in get_args(annotation)
        )
    if origin in {tuple, list}:
        return "a list, each entry " + _describe(get_args(annotation)[0])
    return "a mapping"


def _resolve(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """Return the model that owns the last part of a location, and its field if there is one."""
    owner: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for part in (part for part in location if isinstance(part, str)):
        if field is not None:
            owner = _model_of(field.annotation)
        field = owner.model_fields.get(part) if owner else None
    return owner, field


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
