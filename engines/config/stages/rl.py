"""Configuration of the stage that runs one round of RL."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from engines.config.algorithm import TOPK
from engines.config.base import Change, StrictModel, local_path
from engines.config.model import adapter_travels
from engines.config.plugins import (
    PluginKind,
    is_embedded,
)
from engines.config.rules.algorithm import (
    check_algorithm,
    check_critic,
    check_distillation,
    check_sampling,
    check_served_teacher,
)
from engines.config.rules.batches import (
    check_answer_length,
    check_average,
    check_divides,
    check_rl_order,
)
from engines.config.rules.models import (
    check_judge,
    check_quantization,
    check_reward_models,
    check_structured_output,
    check_value_models,
)
from engines.config.sections import (
    RLConfig,
)
from engines.config.stages.base import (
    REWARD_MODEL,
    ExternalInput,
    InputT,
    RolloutStageConfig,
    TrainingStageConfig,
    model_input,
    reward_inputs,
)

if TYPE_CHECKING:
    from engines.config.recipe import Recipe


class RLRoundStageConfig(TrainingStageConfig, RolloutStageConfig):
    """Trains a policy for one round of RL."""

    stage = "rl_round"
    labelled_by = "round"
    needs = ("dataset",)
    takes = ("policy", "reference", REWARD_MODEL)
    round: int = Field(ge=1)
    rl: RLConfig

    @classmethod
    def from_recipe(cls, recipe: "Recipe", number: int) -> Self:
        """Configure round `number`, counted from 1."""
        return cls(
            round=number,
            model=recipe.model,
            training=recipe.training,
            rollout=recipe.rollout,
            rl=recipe.rl,
            checkpoint=recipe.checkpoint,
            hardware=recipe.hardware,
        )

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Keep the reference only if a KL term needs it; `rl.refresh_reference` uses the policy."""
        found = super().inputs(given)
        found.pop("reference", None)
        name = "policy" if self.rl.refresh_reference else "reference"
        if self.rl.algorithm.needs_reference and name in given:
            found["reference"] = given[name]
        return found

    def identity_values(self) -> dict[str, Any]:
        """Also return the sampling deadline, because a sample that misses it does not train."""
        values = super().identity_values()
        return {**values, "rollout": {**values["rollout"], "timeout_s": self.rollout.timeout_s}}

    def changes(self, before: StrictModel, path: str = "") -> Iterator[Change]:
        """Also yield the sampling deadline, which may change while a round is half-trained."""
        yield from super().changes(before, path)
        assert isinstance(before, RLRoundStageConfig)  # noqa: S101 - configurations of one type
        old, new = before.rollout.timeout_s, self.rollout.timeout_s
        if old != new:
            yield Change(f"{path}rollout.timeout_s", old, new, is_execution=True)

    @property
    def rows(self) -> tuple[str, ...]:
        """`rl`, the prompts."""
        return ("rl",)

    @property
    def driver_computes(self) -> bool:
        """True for a single rank without replicas."""
        return super().driver_computes and is_embedded(self.rollout)

    @property
    def num_previous_steps(self) -> int:
        """Steps of the rounds before this one."""
        return self.rl.num_steps_before(self.round)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also yield the reward and the parts of the algorithm."""
        algorithm = self.rl.algorithm
        yield from super().plugins()
        for name in self.rl.reward.functions:
            yield "reward", name
        yield "adv_estimator", algorithm.adv_estimator
        yield "loss_mode", algorithm.loss_mode
        yield "kl_loss_type", algorithm.kl_loss_type.removesuffix("+")
        if algorithm.use_kl_in_reward:
            yield "kl_loss_type", algorithm.kl_penalty
        taught = self.rl.distillation
        if taught is not None and taught.loss != TOPK:
            yield "kl_loss_type", taught.loss.removesuffix("+")

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return files of reward and teacher, and the model if policy or reference starts there."""
        needs_reference = self.rl.algorithm.needs_reference and "reference" not in given
        teacher = self.rl.distillation
        path = local_path(teacher.path) if teacher else None
        return {
            **reward_inputs(self.rl.reward),
            **({"teacher": ExternalInput(path, "rl.distillation.path")} if path else {}),
            **super().external_inputs(given),
            **(model_input(self.model) if needs_reference else {}),
        }

    def check(self) -> None:
        """Also check the rules of RL."""
        super().check()
        check_structured_output(
            "rl.sampling.structured_output", self.rl.sampling.structured_output, self.rollout
        )
        check_quantization(self.rollout, self.training)
        adapter_travels(self.training, self.rollout)
        check_sampling(self.rl)
        check_algorithm(self.rl)
        check_rl_order(self.rl)
        check_critic(self.rl)
        check_distillation(self.rl)
        check_served_teacher(self.rl, self.rollout, self.model.max_length)
        for path, optimizer in self.rl.optimizers.items():
            check_average(path, optimizer, self.training)
        check_value_models(self.rl, self.training)
        check_reward_models(self.rl.reward)
        check_judge(self.rl.reward, self.rollout)
        check_answer_length(
            "rl.sampling.max_new_tokens", self.rl.sampling.max_new_tokens, self.model.max_length
        )
        # An unset mini-batch is the whole batch, so the error names the batch size.
        smaller = self.rl.prompts_per_update < self.rl.batch_size_prompts
        field = "mini_batch_size_prompts" if smaller else "batch_size_prompts"
        check_divides(f"rl.{field}", self.rl.prompts_per_update, self.training)
