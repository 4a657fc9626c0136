"""The decision of a promotion gate: content of an artifact of kind `promotion`."""

from pathlib import Path
from typing import Self

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError
from infra.field_errors import to_config_error
from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import canonical_json

PROMOTION = "promotion"
DECISION_NAME = "decision.json"
INCUMBENT = "incumbent"
"""Name of the stage's input that is the model with the alias."""
CHALLENGER = "challenger"
"""Alias of the last model that reached the minimum but did not beat the incumbent."""


class Comparison(FrozenModel):
    """Comparison of a model with the incumbent on the same problems."""

    incumbent_digest: str
    value: float
    """The metric in the incumbent's own evaluation."""
    gain: float
    """Mean difference over the common problems; positive if the new model is better."""
    margin: float
    """Half width of the confidence interval of `gain`."""
    confidence: float
    num_problems: int

    @property
    def is_beaten(self) -> bool:
        """True if the incumbent is beaten: the confidence interval of the gain lies above 0."""
        return self.gain > self.margin

    def __str__(self) -> str:
        there = "beyond" if self.is_beaten else "not beyond"
        return (
            f"{self.gain:+.4g} over the incumbent {self.incumbent_digest[:12]} on "
            f"{self.num_problems} problems, {there} the {self.margin:.4g} of chance "
            f"({self.confidence:.0%})"
        )


class Decision(FrozenModel):
    """Content of `decision.json`: whether a model gets an alias."""

    promoted: bool
    metric: str
    value: float
    min_value: float
    model_digest: str
    model_name: str
    alias: str
    """Alias of the incumbent, which moves to a promoted model."""
    comparison: Comparison | None = None
    """Comparison with the incumbent; None if there was no incumbent."""
    reason: str = ""

    @property
    def given_alias(self) -> str:
        """Alias that the model gets; empty if it is below `min_value` and is not registered."""
        if self.promoted:
            return self.alias
        return CHALLENGER if self.value >= self.min_value else ""

    def write(self, directory: Path) -> None:
        """Write the decision to a directory."""
        atomic_write_bytes(directory / DECISION_NAME, canonical_json(self))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the decision from a directory; ArtifactCorruptError if it is missing or invalid."""
        path = directory / DECISION_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ArtifactCorruptError(f"{path} is not there") from None
        except ValidationError as error:
            said = to_config_error(error, cls)
            raise ArtifactCorruptError(f"{path} is of another version: {said}") from error
