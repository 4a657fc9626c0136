"""The base of every configuration model.

Promises: unknown keys are refused, values are frozen, NaN and infinity are refused, and the
docstring under a field becomes its description in the JSON schema (and so in the UI's form).
Does not promise: anything about files, devices or plugins; that is preflight's work.
"""

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
