"""A suite: a held-out set, with the way it is answered and judged, or tasks of another harness."""

from typing import Annotated

from pydantic import Field, model_validator

from engines.config.algorithm import RewardConfig
from engines.config.base import NotIdentity, StrictModel
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.sections import EvaluationConfig
from infra.plugin_table import PluginTable
from infra.plugins import Row

HELD_OUT = "evaluation"
_OF_TRAINING = ("max_prompt_length", "on_overlong", "allow_overlap", "decontamination")
"""Fields of the data that a suite, which fits any model and trains none, has no use for."""
LM_EVAL = "lm_eval"
HARNESSES = PluginTable(
    "harness",
    "suites.*.harness",
    [
        Row(
            name=LM_EVAL,
            target="engines.trainers.evaluation.harness.run:run_tasks",
            requires="lm_eval",
            environment="lm-eval",
        )
    ],
    Row,
)
"""One row: where the libraries of lm-evaluation-harness are, and what is said without them."""


def suite_sections(name: str) -> dict[str, str]:
    """Return the paths of recipe sections within a suite, by the path in a recipe.

    Returns:
        By the recipe's name, the suite's.
    """
    return {
        each: f"suites.{name}.{each.removeprefix('rl.')}"
        for each in ("data", "evaluation", "rl.reward")
    }


class HarnessConfig(StrictModel):
    """Tasks of EleutherAI's lm-evaluation-harness, with its own prompts and metrics."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks, groups or tags (`arc_easy`, `mmlu`), which
    `.envs/lm-eval/bin/lm_eval ls tasks` lists."""
    include: Annotated[str | None, NotIdentity] = None
    """Directory with YAML files of further tasks; paths in them are relative to it. Their Python
    functions are run."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question; null: as the task says."""
    limit: int | None = Field(default=None, ge=1)
    """The first documents of each task; null: all."""
    apply_chat_template: bool = False
    """Write prompts with the model's chat template."""
    fewshot_as_multiturn: bool = True
    """Under a chat template: each example as a turn of its own."""
    system_instruction: str | None = None
    """Text before every prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens, for tasks that set no limit."""
    fewshot_seed: int = Field(default=1234, ge=0)
    """Seed that chooses few-shot examples; published numbers use the default."""
    bootstrap_iters: int = Field(default=100_000, ge=0)
    """Resamples for standard errors that have no formula; 0 has no standard errors at all."""

    @model_validator(mode="after")
    def _check_tasks(self) -> "HarnessConfig":
        if "" in self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks: got {list(self.tasks)}; need names, each once")
        return self


class SuiteConfig(StrictModel):
    """One more held-out set that the final model is measured on, beside the recipe's own."""

    data: DataConfig | None = None
    """Its `evaluation`, or `arithmetic`, of which the held-out problems are taken."""
    harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness, instead of `data` with a reward."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """null of a field takes what `rl.sampling` has, as in a recipe."""
    reward: RewardConfig | None = None
    """Judges the answers; null: `rl.reward`."""

    @model_validator(mode="after")
    def _check_kind(self) -> "SuiteConfig":
        if (self.data is None) == (self.harness is None):
            found = "neither" if self.data is None else "both"
            raise ValueError(f"data: got {found} of data and harness; need one of them")
        own = {"evaluation": self.evaluation != EvaluationConfig(), "reward": self.reward}
        if self.harness and any(own.values()):
            name = next(name for name, given in own.items() if given)
            raise ValueError(
                f"{name}: got one beside harness, whose tasks say how they are asked and judged; "
                "remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_held_out(self) -> "SuiteConfig":
        others = [
            name
            for name in SOURCE_SPLITS
            if self.data and name != HELD_OUT and getattr(self.data, name)
        ]
        if others:
            raise ValueError(
                f"data.{others[0]}: got a source; a suite only measures; remove it, or call it "
                "data.evaluation"
            )
        usual = DataConfig.model_fields
        given = [
            name
            for name in _OF_TRAINING
            if self.data and getattr(self.data, name) != usual[name].default
        ]
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
