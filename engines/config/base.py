"""The base of every configuration model, and the mark of what does not count.

Promises: unknown keys are refused, values are frozen, NaN and infinity are refused, and the
docstring under a field becomes its description in the JSON schema (and so in the UI's form).
Every field counts for the identity of the stage that holds it, unless its own declaration is
marked `NotIdentity`; one marked `Execution` counts too, but half-trained work survives its change.
Does not promise: anything about files, devices or plugins; that is preflight's work.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class NotIdentity:
    """Marks a field that cannot change a number: `timeout_s: Annotated[float, NotIdentity]`.

    For deadlines, save intervals, retention, transports and places.
    """


class Execution:
    """Marks a field that says how a number is computed and not which: a layout, a memory knob.

    It counts, because sums are rounded differently; a half-trained stage can go on under another
    value. Whatever is not marked says what is trained.
    """


class Change(NamedTuple):
    """A field that counts and has another value than before."""

    field: str
    """Dotted path."""
    before: Any
    now: Any
    is_execution: bool
    """True if the field is marked `Execution`."""

    def __str__(self) -> str:
        return f"{self.field} {self.before} -> {self.now}"


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
        """YAML reads `yes` as true, which pydantic would take for 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and _is_number(field.annotation):
                raise ValueError(f"{name}: got {value}; need a number")
        return values

    def identity_values(self) -> dict[str, Any]:
        """Values that are part of the fingerprint, as plain JSON values.

        All of it but the fields marked `NotIdentity`. A model with a path to something of the
        user's leaves the path out: the bytes it leads to count, as the digest of an input.
        """
        return {
            name: _values(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if NotIdentity not in field.metadata
        }

    def changes(self, before: "StrictModel", path: str = "") -> Iterator[Change]:
        """Yield the values of the fingerprint that differ.

        Args:
            before: another configuration of this type.
            path: dotted, of this configuration, with a dot at its end.

        Yields:
            Change: the innermost field of each difference.
        """
        values, others = self.identity_values(), before.identity_values()
        for name in values:
            old, new = getattr(before, name), getattr(self, name)
            if values[name] == others[name]:
                continue
            if isinstance(new, StrictModel) and type(old) is type(new):
                yield from new.changes(old, f"{path}{name}.")
            else:
                field = type(self).model_fields[name]
                yield Change(f"{path}{name}", old, new, Execution in field.metadata)


def _is_number(annotation: Any) -> bool:
    """True if a field takes numbers and no booleans."""
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds


def local_path(text: str | None) -> Path | None:
    """The local file or directory that a setting names; None for a hub id, or nothing.

    Args:
        text: a path, a hub id or nothing.

    Returns:
        The path, if something is there.
    """
    path = Path(text).expanduser() if text else None
    return path if path and path.exists() else None


def _values(value: Any) -> Any:
    if isinstance(value, StrictModel):
        return value.identity_values()
    if isinstance(value, tuple | list):
        return [_values(item) for item in value]
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    return value
