"""The decision of a gate, as the artifact of kind `promotion` holds it."""

from pathlib import Path
from typing import Self

from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import canonical_json

PROMOTION = "promotion"
DECISION_NAME = "decision.json"


class Decision(FrozenModel):
    """`decision.json`: whether a model may bear an alias."""

    promoted: bool
    metric: str
    value: float
    min_value: float
    model_digest: str
    model_name: str
    """Of the registered model."""
    alias: str

    def write(self, directory: Path) -> None:
        """Put it into a directory."""
        atomic_write_bytes(directory / DECISION_NAME, canonical_json(self))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The decision that a directory holds."""
        return cls.model_validate_json((directory / DECISION_NAME).read_bytes())
