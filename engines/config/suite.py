"""A suite: a held-out set with its own evaluation and reward, or tasks of another harness."""

from typing import Annotated

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.base import NotIdentity, Refusals, StrictModel
from engines.config.data import SOURCE_SPLITS, DataConfig
from engines.config.sections import EvaluationConfig
from infra.plugins import PluginTable, Row

HELD_OUT = "evaluation"
_OF_TRAINING = ("max_prompt_length", "on_overlong", "allow_overlap", "decontamination")
"""Fields of the data that a suite must not set, because it fits any model and trains none."""
LM_EVAL = "lm_eval"
HARNESSES = PluginTable(
    "harness",
    "suites.*.harness",
    [
        Row(
            name=LM_EVAL,
            target="engines.trainers.evaluation.harness:run_tasks",
            requires="lm_eval",
            environment="lm-eval",
        )
    ],
    Row,
)


def suite_sections(name: str) -> dict[str, str]:
    """Return the paths of recipe sections inside a suite, by their path in a recipe."""
    return {
        each: f"suites.{name}.{each.removeprefix('rl.')}"
        for each in ("data", "evaluation", "rl.reward")
    }


class HarnessConfig(StrictModel):
    """Tasks of EleutherAI's lm-evaluation-harness, with its own prompts and metrics."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Tasks, groups or tags (`arc_easy`); listed by `.envs/lm-eval/bin/lm_eval ls tasks`."""
    include: Annotated[str | None, NotIdentity] = None
    """Directory with YAML files of further tasks; their paths are relative to it, their Python is
    run."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question; null: as the task says."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first documents of each task; null: all."""
    apply_chat_template: bool = False
    """Write prompts with the model's chat template."""
    fewshot_as_multiturn: bool = True
    """With a chat template: make each example a turn of its own."""
    system_instruction: str | None = None
    """Text before every prompt; null: none."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens, for tasks that set no limit."""
    fewshot_seed: int = Field(default=1234, ge=0)
    """Seed that chooses few-shot examples; published numbers use the default."""
    bootstrap_iters: int = Field(default=100_000, ge=0)
    """Resamples for standard errors without a formula; 0 gives no standard errors at all."""

    def _refusals(self) -> Refusals:
        yield (
            "" in self.tasks or len(set(self.tasks)) < len(self.tasks),
            f"tasks: got {list(self.tasks)}; need names, each once",
        )


class SuiteConfig(StrictModel):
    """A further held-out set that the final model is measured on."""

    data: DataConfig | None = None
    """Held-out problems, from its `evaluation` or `arithmetic`; null: `harness` is set."""
    harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness, instead of `data` and a reward; null: `data` is set."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How answers are sampled; a null field uses `rl.sampling`, as in a recipe."""
    reward: RewardConfig | None = None
    """Reward that scores the answers; null: `rl.reward`."""

    def _refusals(self) -> Refusals:
        yield (
            (self.data is None) == (self.harness is None),
            f"data: got {'both' if self.data else 'neither'} of data and harness; need one of them",
        )
        for name in ("evaluation", "reward"):
            yield (
                self.harness and getattr(self, name) != type(self).model_fields[name].default,
                f"{name}: got one beside harness, whose tasks define their own prompts and "
                "scores; remove it",
            )
        for name in SOURCE_SPLITS:
            yield (
                name != HELD_OUT and getattr(self.data, name, ()),
                f"data.{name}: got a source; a suite only measures; remove it, or call it "
                "data.evaluation",
            )
        for name in _OF_TRAINING:
            yield (
                self.data and getattr(self.data, name) != DataConfig.model_fields[name].default,
                f"data.{name}: got a training setting; a suite serves any model and trains on "
                "none; remove it",
            )
        for name in self.reward.models if self.reward else ():
            yield (
                True,
                f"reward.{name}: got a model; need functions only; remove the suite's reward, so "
                "that it uses rl.reward, which may have a model",
            )
