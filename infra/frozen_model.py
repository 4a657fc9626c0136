"""The base of everything that is written as JSON and read again, here or elsewhere."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Values never change; a key that this code does not know is refused, not lost."""

    model_config = ConfigDict(extra="forbid", frozen=True)
