"""Recipe sections for stages: training, evaluation, checkpoints and promotion."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from engines.config.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    MismatchConfig,
    RewardConfig,
)
from engines.config.base import NotIdentity, Refusals, StrictModel
from engines.config.data import OrderConfig
from engines.config.rollout import (
    SamplingConfig,
    StructuredOutputConfig,
    check_stop,
    check_stop_token_ids,
)
from engines.config.training import OptimizerConfig
from infra.errors import ConfigError


class CheckpointConfig(StrictModel):
    """Step checkpoints inside a stage."""

    every_num_steps: Annotated[int, NotIdentity] = Field(default=50, ge=1)
    """Save a checkpoint every this many steps."""
    num_keep: Annotated[int, NotIdentity] = Field(default=2, ge=2)
    """Newest checkpoints to keep; at least 2, because the newest may still be being written."""
    async_save: Annotated[bool, NotIdentity] = False
    """Copy the state to host memory and write it while training continues."""
    timeout_s: Annotated[float, NotIdentity] = Field(default=1800.0, gt=0)
    """Deadline in seconds for writing one checkpoint in the background."""


class SupervisedConfig(StrictModel):
    """Base of sections that train on given answers."""

    num_steps: int = Field(default=200, ge=1)
    target_loss: float | None = Field(default=None, gt=0)
    """Stop early when the moving average of the training loss reaches this; null runs all steps."""
    order: OrderConfig = OrderConfig()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5, schedule="cosine")
    max_num_poisoned_updates: Annotated[int, NotIdentity] = Field(default=3, ge=0)
    """Optimizer steps of the stage that may be skipped because the loss or gradient was not finite;
    one more stops the run. Each is counted and its rows are named."""


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    batch_size_sequences: int = Field(default=128, ge=1)
    """Sequences of one optimizer step, over all ranks."""


class PairsConfig(SupervisedConfig):
    """Base of sections that train on pairs of answers."""

    batch_size_pairs: int = Field(default=64, ge=1)
    """Pairs of one optimizer step, over all ranks."""
    held_out_every_num_steps: Annotated[int | None, NotIdentity] = Field(default=None, ge=1)
    """Evaluate the held-out pairs (`data.preference_evaluation`) every this many steps, besides the
    start and end of the stage; null: at the start and end only."""
    options: dict[str, Any] = {}
    """Options of the loss (`beta`, `margin_coef`, ...), validated by it."""


class SelfPlayConfig(StrictModel):
    """Preference pairs made from the policy's own answers, anew in each iteration."""

    source: Literal["spin", "best_worst"] = "spin"
    """`spin`: the answer of a `data.sft` row against the policy's (SPIN, arXiv:2401.01335).
    `best_worst`: the best against the worst by reward of several answers to a `data.rl` row
    (iterative DPO, arXiv:2312.11456)."""
    num_iterations: Annotated[int, NotIdentity] = Field(default=3, ge=1)
    """Iterations; each uses pairs made by the policy of the previous one. Adding one re-runs none.
    """
    num_prompts: int | None = Field(default=None, ge=1)
    """Rows of one iteration, taken in turn from an endless shuffled order; null: all rows."""
    num_samples: int | None = Field(default=None, ge=1)
    """Answers per prompt; null: 1 for `spin`, 8 for `best_worst`."""
    sampling: SamplingConfig | None = None
    """How answers are sampled; null uses `rl.sampling`."""

    def _refusals(self) -> Refusals:
        yield (
            self.source == "best_worst" and self.samples_per_prompt < 2,
            f"num_samples: got {self.num_samples} with source best_worst; need 2 or more, to "
            "compare them",
        )

    @property
    def samples_per_prompt(self) -> int:
        """`num_samples`, with null resolved."""
        return self.num_samples or (1 if self.source == "spin" else 8)


class PreferenceConfig(PairsConfig):
    """Preference training of the policy: DPO and its family."""

    self_play: SelfPlayConfig | None = None
    """Train on pairs of the policy's own answers, iteratively; null: on `data.preference`, once."""

    loss: str = "sigmoid"
    """`sigmoid` (DPO), `ipo`, `simpo`, `orpo`, or `kto`, which treats each answer independently."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-7, schedule="cosine")


class RewardTrainingConfig(PairsConfig):
    """Training of a reward model on pairs (Bradley-Terry)."""


class CriticConfig(StrictModel):
    """The value model of PPO."""

    start: Literal["policy", "reward_model"] = "policy"
    """Initial critic weights in the first round: `policy` takes the policy's with a zero head;
    `reward_model` takes `rl.reward.model` with its head (arXiv:2203.02155 app. C.4), which must use
    the policy's tokens."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    num_warmup_steps: int = Field(default=0, ge=0)
    """First RL steps of the critic, counted over all rounds, that train the critic alone. A critic
    that starts anew because the previous round was rejected warms up again."""
    cliprange_value: float | None = Field(default=0.5, gt=0)
    """Clip range of the value loss around the value before the step; null does not clip."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes of the critic over each batch; null uses `rl.num_epochs`."""


class KeepSamplesConfig(StrictModel):
    """Samples of a round that are kept for people to read; `rlhf show` makes a page of them."""

    num_per_step: int = Field(default=16, ge=0)
    """Samples of a step that are kept, the first ones; 0 keeps none."""
    every_num_steps: int = Field(default=10, ge=1)
    """Keep samples every this many steps, and at the first and last step of a round."""


class RLConfig(StrictModel):
    """Iterative RL; one round is one stage."""

    num_rounds: Annotated[int, NotIdentity] = Field(default=1, ge=0)
    """Number of rounds; each is a stage of its own, so adding one re-runs none."""
    num_steps_per_round: int = Field(default=20, ge=1)
    """RL steps of a round: generate, score, train, publish."""
    batch_size_prompts: int = Field(default=32, ge=1)
    """Prompts of one RL step."""
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    mini_batch_size_prompts: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step; null trains on the whole batch at once."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    order: OrderConfig = OrderConfig()
    """Order of the prompts; its steps are counted over all rounds."""
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    """The value model, for estimators that read values; null: no critic."""
    refresh_reference: bool = False
    """Take the policy at the start of each round as reference; false: the reference of round 1."""
    reward: RewardConfig = RewardConfig()
    distillation: DistillationConfig | None = None
    """Learn from a teacher, in addition to rewards or instead of them; null: no teacher."""
    mismatch: Annotated[MismatchConfig, NotIdentity] = MismatchConfig()
    keep_samples: Annotated[KeepSamplesConfig, NotIdentity] = KeepSamplesConfig()
    max_num_skipped_steps: Annotated[int, NotIdentity] = Field(default=10, ge=0)
    """Consecutive steps that may have nothing to train on; one more stops the run."""
    max_aborted_frac: Annotated[float, NotIdentity] = Field(default=0.1, ge=0, le=1)
    """Share of the samples of one generation that may be unfinished at `rollout.timeout_s`. A
    larger share stops the run, because only short answers would remain."""
    max_num_poisoned_updates: Annotated[int, NotIdentity] = Field(default=3, ge=0)
    """Optimizer steps of a round, of all roles together, that may be skipped because the loss or
    gradient was not finite; one more stops the run. Each is counted and its samples are named."""

    def _refusals(self) -> Refusals:
        yield (
            self.batch_size_prompts % self.prompts_per_update,
            f"batch_size_prompts: {self.batch_size_prompts} is not a multiple of "
            f"mini_batch_size_prompts {self.mini_batch_size_prompts}; set it to a multiple",
        )

    def num_steps_before(self, number: int) -> int:
        """Return the steps of the rounds before round `number`, which counts from 1."""
        return (number - 1) * self.num_steps_per_round

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Optimizer of every trained role, by its recipe path."""
        critic = {"rl.critic.optimizer": self.critic.optimizer} if self.critic else {}
        return {"rl.optimizer": self.optimizer, **critic}

    @property
    def learns_from_rewards(self) -> bool:
        """True if the algorithm's own loss is part of the gradient."""
        return self.distillation is None or self.distillation.policy_weight > 0

    @property
    def prompts_per_update(self) -> int:
        """Prompts of one optimizer step."""
        return self.mini_batch_size_prompts or self.batch_size_prompts


class EvaluationConfig(StrictModel):
    """Held-out evaluation: greedy pass@1 and, if asked, sampled pass@k, maj@k, avg@k, best@k."""

    num_problems: int | None = Field(default=None, ge=1)
    """Number of problems; null takes every evaluation row."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens; null uses `rl.sampling.max_new_tokens`."""
    stop: Annotated[tuple[str, ...] | None, AfterValidator(check_stop)] = None
    """Texts that end an answer; null uses `rl.sampling.stop`, `[]` means none."""
    stop_token_ids: Annotated[tuple[int, ...] | None, AfterValidator(check_stop_token_ids)] = None
    """Tokens that end an answer; null uses `rl.sampling.stop_token_ids`, `[]` means none."""
    structured_output: StructuredOutputConfig | None = None
    """Form that answers must have, if the rollout engine supports it; null: any form."""
    num_samples: int = Field(default=0, ge=0)
    """Samples per problem for pass@k and similar metrics; an explicit 0 skips the sampled part. If
    unset, `pass_at`, `temperature`, `top_p` and `top_k` are refused."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k; each at least 1 and at most `num_samples`."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled answers; greedy ones use 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus probability of the sampled answers."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that the sampled answers draw from; 0 switches it off."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Confidence level of the reported intervals."""

    def _refusals(self) -> Refusals:
        yield (
            min(self.pass_at, default=0) < 1,
            f"pass_at: got {list(self.pass_at)}; need one or more integers >= 1",
        )
        yield (
            self.num_samples and max(self.pass_at) > self.num_samples,
            f"pass_at: got {max(self.pass_at)}; need at most num_samples {self.num_samples}",
        )
        samples = self.num_samples or "num_samples" in self.model_fields_set
        for name in () if samples else ("pass_at", "temperature", "top_p", "top_k"):
            value = getattr(self, name)
            shown, need = (list(value), max(value)) if name == "pass_at" else (value, 1)
            yield (
                value != type(self).model_fields[name].default,
                f"{name}: got {shown} without num_samples, and nothing is sampled; need "
                f"num_samples {need} or more; set it (0 means none), or remove {name}",
            )

    @property
    def answer_length(self) -> int:
        """Longest answer in tokens; raises `ConfigError` while `max_new_tokens` is null."""
        if self.max_new_tokens is None:
            raise ConfigError("evaluation.max_new_tokens", "missing; need a number of tokens")
        return self.max_new_tokens

    def sampling(self, *, greedy: bool) -> SamplingConfig:
        """Return the sampling of the greedy or sampled part; raises as `answer_length` does."""
        return SamplingConfig(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy else self.top_k,
            max_new_tokens=self.answer_length,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            structured_output=self.structured_output,
        )


class SoupConfig(StrictModel):
    """The final model as the mean of the weights of several policies (arXiv:2203.05482)."""

    num_policies: int = Field(default=2, ge=2)
    """Number of last policies to average, counted over SFT, preference training and every RL round.
    A rejected round has none; fewer are averaged if fewer exist."""


class PromoteConfig(StrictModel):
    """Conditions for registering the final model, and its name and alias in the registry."""

    model_name: str = "policy"
    """Name of the registered model in MLflow."""
    alias: str = "champion"
    """Alias of a model that beats its current holder; a model that does not is `challenger`."""
    suite: Annotated[str | None, NotIdentity] = None
    """Suite whose evaluation decides; null: the recipe's own evaluation."""
    metric: str = "accuracy"
    """Metric with a value per problem: `accuracy`, `reward/mean`, `pass@k`, `maj@k` or `avg@k`."""
    min_value: float = Field(default=0.0)
    """Value that the metric of the final evaluation must reach; below it nothing is registered."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Two-sided confidence level of the interval of the gain over the incumbent."""

    def _refusals(self) -> Refusals:
        is_share = re.fullmatch(r"accuracy|(pass|maj|avg)@[1-9]\d*", self.metric)
        yield (
            not is_share and self.metric != "reward/mean",
            f"metric: got {self.metric!r}; need accuracy, reward/mean, pass@k, maj@k or "
            "avg@k (pass@4)",
        )
        yield (
            self.alias == "challenger",
            "alias: got 'challenger', which models that lose get; set another",
        )
        yield (
            is_share and self.min_value > 1,
            f"min_value: got {self.min_value:g}; {self.metric} is at most 1; use "
            f"{self.min_value / 100:g} for {self.min_value:g} %",
        )
