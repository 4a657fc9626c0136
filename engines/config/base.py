"""The base of every configuration model.

Promises: unknown keys are refused, values are frozen, NaN and infinity are refused, and the
docstring under a field becomes its description in the JSON schema (and so in the UI's form).
Does not promise: anything about files, devices or plugins; that is preflight's work.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


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


def _is_number(annotation: Any) -> bool:
    """Whether a field takes numbers and no truth values."""
    kinds = {annotation, *get_args(annotation)}
    return bool(kinds & {int, float}) and bool not in kinds
