"""The decision of a gate, as the artifact of kind `promotion` holds it."""

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
"""Name of the stage's input that is the model which had the alias."""
CHALLENGER = "challenger"
"""Alias of the last model that was good enough but did not beat the incumbent."""


class Comparison(FrozenModel):
    """A model beside the incumbent, on the same problems."""

    incumbent_digest: str
    value: float
    """Of the incumbent's own evaluation."""
    gain: float
    """Mean difference of the problems that both were scored on; above 0: the new one is better."""
    margin: float
    """What chance alone gives: the interval of the gain is `gain` -+ `margin`."""
    confidence: float
    num_problems: int

    @property
    def is_beaten(self) -> bool:
        """Whether the interval of the gain lies above 0."""
        return self.gain > self.margin

    def __str__(self) -> str:
        there = "beyond" if self.is_beaten else "not beyond"
        return (
            f"{self.gain:+.4g} over the incumbent {self.incumbent_digest[:12]} on "
            f"{self.num_problems} problems, {there} the {self.margin:.4g} of chance "
            f"({self.confidence:.0%})"
        )


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
    """Of the incumbent, which the model takes if it is promoted."""
    comparison: Comparison | None = None
    """None: there was no incumbent."""
    reason: str = ""

    @property
    def given_alias(self) -> str:
        """The alias that the model gets; empty: it is not registered, as it is below the bar."""
        if self.promoted:
            return self.alias
        return CHALLENGER if self.value >= self.min_value else ""

    def write(self, directory: Path) -> None:
        """Put it into a directory."""
        atomic_write_bytes(directory / DECISION_NAME, canonical_json(self))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The decision that a directory holds.

        Args:
            directory: of the artifact.

        Returns:
            What `write` put there.

        Raises:
            ArtifactCorruptError: there is none, or none that this version reads.
        """
        path = directory / DECISION_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ArtifactCorruptError(f"{path} is not there") from None
        except ValidationError as error:
            said = to_config_error(error, cls)
            raise ArtifactCorruptError(f"{path} is of another version: {said}") from error
