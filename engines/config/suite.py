"""A suite: a held-out set, with the way it is answered and judged."""

from pydantic import model_validator

from engines.config.algorithm import RewardConfig
from engines.config.base import StrictModel
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.sections import EvaluationConfig

HELD_OUT = "evaluation"


class SuiteConfig(StrictModel):
    """One more held-out set that the final model is measured on, beside the recipe's own."""

    data: DataConfig
    """Its `evaluation`, or `arithmetic`, of which the held-out problems are taken."""
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
        if self.reward and self.reward.models:
            name = next(iter(self.reward.models))
            raise ValueError(
                f"reward.{name}: got a model; need functions alone; a model that judges stands in "
                "rl.reward, which a suite without a reward of its own takes"
            )
        return self
