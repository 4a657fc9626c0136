"""The base of every configuration model, and the mark of what does not count.

Promises: unknown keys are refused, values are frozen, NaN and infinity are refused, and the
docstring under a field becomes its description in the JSON schema (and so in the UI's form).
Every field counts for the identity of the stage that holds it, unless its own declaration is
marked `NotIdentity`.
Does not promise: anything about files, devices or plugins; that is preflight's work.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class NotIdentity:
    """Marks a field that cannot change a number: `timeout_s: Annotated[float, NotIdentity]`.

    For deadlines, save intervals, retention, transports and places. A path is a place: the bytes
    it leads to count, as the digest of an input.
    """


def identity_values(value: Any) -> Any:
    """What counts of a configuration: all of it but the fields marked `NotIdentity`.

    Args:
        value: a configuration model, or a value inside of one.

    Returns:
        Plain JSON values.
    """
    if isinstance(value, StrictModel):
        return {
            name: identity_values(getattr(value, name))
            for name, field in type(value).model_fields.items()
            if NotIdentity not in field.metadata
        }
    if isinstance(value, tuple | list):
        return [identity_values(item) for item in value]
    if isinstance(value, dict):
        return {key: identity_values(item) for key, item in value.items()}
    return value
