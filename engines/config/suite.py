"""A suite: a held-out set, with the way it is answered and judged."""

from pydantic import model_validator

from engines.config.algorithm import RewardConfig
from engines.config.base import StrictModel
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.sections import EvaluationConfig

HELD_OUT = "evaluation"
_OF_TRAINING = ("max_prompt_length", "on_overlong", "allow_overlap", "decontamination")
"""Fields of the data that a suite, which fits any model and trains none, has no use for."""


def suite_sections(name: str) -> dict[str, str]:
    """What the sections of a recipe are called where a suite has them.

    Args:
        name: of the suite.

    Returns:
        By the recipe's name, the suite's.
    """
    return {
        each: f"suites.{name}.{each.removeprefix('rl.')}"
        for each in ("data", "evaluation", "rl.reward")
    }


class SuiteConfig(StrictModel):
    """One more held-out set that the final model is measured on, beside the recipe's own."""

    data: DataConfig
    """Where the held-out problems are: its `evaluation`, or `arithmetic`."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """null of a field takes what `rl.sampling` has, as in a recipe."""
    reward: RewardConfig | None = None
    """Judges the answers; null: `rl.reward`."""

    @model_validator(mode="after")
    def _check_held_out(self) -> "SuiteConfig":
        others = [name for name in SOURCE_SPLITS if name != HELD_OUT and getattr(self.data, name)]
        if others:
            raise ValueError(
                f"data.{others[0]}: got a source; a suite only measures; remove it, or call it "
                "data.evaluation"
            )
        usual = DataConfig.model_fields
        given = [name for name in _OF_TRAINING if getattr(self.data, name) != usual[name].default]
        if given:
            raise ValueError(
                f"data.{given[0]}: got one; a suite has the problems of any model and trains on "
                "none; remove it"
            )
        if self.reward and self.reward.models:
            name = next(iter(self.reward.models))
            raise ValueError(
                f"reward.{name}: got a model; need functions alone; a model that judges stands in "
                "rl.reward, which a suite without a reward of its own takes"
            )
        return self
