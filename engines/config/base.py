"""Base class of the configuration models, and the markers of how a field counts for identity.

Promises: unknown keys, NaN and infinity are refused, values are frozen, and the docstring below a
field is its description in the JSON schema. Every field counts for its stage's fingerprint unless
it is marked `NotIdentity` or is a local path. Does not promise: checks of files or plugins.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from infra.field_errors import to_config_error


class NotIdentity:
    """Marks a field that cannot change a number: deadlines, save intervals, transports, paths."""


class Execution:
    """Marks a field that sets how a number is computed, such as a layout or a memory setting.

    It counts for the fingerprint, because it changes the rounding of sums; adoption lets it differ.
    """


class Change(NamedTuple):
    """A field of the fingerprint whose value differs."""

    field: str
    """Dotted path."""
    before: Any
    now: Any
    is_execution: bool
    """True if the field is marked `Execution`."""

    def __str__(self) -> str:
        return f"{self.field} {self.before} -> {self.now}"


Refusals = Iterator[tuple[object, str]]
"""Pairs of a condition and an error text; a true condition is an error."""


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, values: Any) -> Any:
        """Refuse booleans as numbers: YAML reads `yes` as true, and pydantic would read it as 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and _is_number(field.annotation):
                raise ValueError(f"{name}: got {value}; need a number")
        return values

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> Self:
        for is_refused, problem in self._refusals():
            if is_refused:
                raise ValueError(problem)
        return self

    def _refusals(self) -> Refusals:
        """Yield pairs of a condition and an error text, which may begin with `field: `.

        The text of the first true condition is raised; code after that `yield` does not run.
        """
        yield from ()

    @classmethod
    def validated(cls, values: object, path: str) -> Self:
        """Return a model with these values; `ConfigError` below `path` if one is invalid."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise to_config_error(error, cls, path) from None

    def identity_values(self) -> dict[str, Any]:
        """Return the values of the fingerprint as plain JSON values, without `NotIdentity` fields.

        `PathConfig` leaves out a local path too: the digest of its bytes counts as an input.
        """
        return {
            name: _values(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if NotIdentity not in field.metadata
        }

    def changes(self, before: "StrictModel", path: str = "") -> Iterator[Change]:
        """Yield the innermost fields that differ; `path` is their prefix, empty or with a dot."""
        values, others = self.identity_values(), before.identity_values()
        for name in (name for name in values if values[name] != others[name]):
            old, new = getattr(before, name), getattr(self, name)
            if isinstance(new, StrictModel) and type(old) is type(new):
                yield from new.changes(old, f"{path}{name}.")
            else:
                yield Change(
                    f"{path}{name}", old, new, Execution in type(self).model_fields[name].metadata
                )


class PathConfig(StrictModel):
    """Base of sections with a field `path`: a local path or a hub id."""

    def identity_values(self) -> dict[str, Any]:
        """Leave out a local path; a hub id counts, with its commit."""
        values = super().identity_values()
        return {**values, "path": None} if local_path(values["path"]) else values


def _is_number(annotation: Any) -> bool:
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds


def local_path(text: str | None) -> Path | None:
    """Return the existing local path that a setting names; None for a hub id or an unset one."""
    path = Path(text).expanduser() if text else None
    return path if path and path.exists() else None


def _values(value: Any) -> Any:
    if isinstance(value, StrictModel):
        return value.identity_values()
    if isinstance(value, tuple | list):
        return [_values(item) for item in value]
    return {k: _values(item) for k, item in value.items()} if isinstance(value, dict) else value
