"""Base class of models that are written as JSON and read again."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable pydantic model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
