"""The RL algorithm, its rewards and its teacher; estimators and losses have verl's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engines.config.base import Execution, NotIdentity, Refusals, StrictModel
from engines.config.model import (
    JudgeConfig,
    JudgingModelConfig,
    NamedModelConfig,
    RewardModelConfig,
)

MIXTURE = "mixture"
"""Name of the reward that combines components."""
_PYTHON = ".py"

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class FilterGroupsConfig(StrictModel):
    """DAPO dynamic sampling (arXiv:2503.14476): groups of equal scores carry no gradient."""

    enable: bool = False
    max_num_gen_batches: int = Field(default=4, ge=1)
    """Limit of generation batches for one step, which then trains on the groups that it has."""


class OverlongConfig(StrictModel):
    """DAPO soft overlong punishment: a linear penalty in the last `buffer_length` tokens."""

    enable: bool = False
    buffer_length: int = Field(default=16, ge=1)
    penalty_factor: float = Field(default=1.0, ge=0)


class PfPpoConfig(StrictModel):
    """PF-PPO (arXiv:2409.06957): resample the answers to each prompt by their rewards."""

    enable: bool = False
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: float = Field(default=2.0, gt=0)
    """Exponent of `pow`."""


class KlControlConfig(StrictModel):
    """The coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the KL of a step towards `target_kl` (arXiv:1909.08593 sec. 2.2)."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient; for `adaptive`, its initial value."""
    horizon: float = Field(default=10_000, gt=0)
    """`adaptive` multiplies by 1 + (clipped relative KL error) * (samples of a step) / this."""
    target_kl: float = Field(default=0.1, gt=0)
    """Target in nats per token, averaged over each answer and then over the answers of a step."""


class AlgorithmConfig(StrictModel):
    """One policy-gradient algorithm, composed of registered parts."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    """false is Dr. GRPO (arXiv:2503.20783); pair it with `seq-mean-token-sum-norm`."""
    loss_mode: str = "vanilla"
    clip_ratio: float = Field(default=0.2, gt=0)
    clip_ratio_low: float | None = Field(default=None, gt=0)
    """null uses `clip_ratio`."""
    clip_ratio_high: float | None = Field(default=None, gt=0)
    """null uses `clip_ratio`; DAPO's clip-higher is 0.28."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual-clip bound for negative advantages (arXiv:1912.09729)."""
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Constant divisor of `seq-mean-token-sum-norm`; null uses `max_new_tokens`."""
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: str = "low_var_kl"
    """`kl`|`k1`, `abs`, `mse`|`k2`, `low_var_kl`|`k3`; a trailing `+` uses the k2 gradient."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward of each token."""
    kl_penalty: str = "kl"
    """Estimator of the KL in the reward; named like `kl_loss_type`, without `+` (no gradient)."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    positive_nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of correct answers (VAPO, arXiv:2504.05118 4.3)."""
    pf_ppo: PfPpoConfig = PfPpoConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong: OverlongConfig = OverlongConfig()
    options: dict[str, Any] = {}
    """Options of the estimator or loss, validated by it."""

    @property
    def needs_reference(self) -> bool:
        """True if a part reads logprobs of the reference."""
        return self.use_kl_loss or self.use_kl_in_reward

    def _refusals(self) -> Refusals:
        name = "clip_ratio_low" if self.clip_ratio_low else "clip_ratio"
        low = self.clip_ratio_low or self.clip_ratio
        yield low >= 1, f"{name}: got {low}; need < 1, since ratios are clipped at 1 - {name}"


class MismatchConfig(StrictModel):
    """Bounds of |rollout logprob - training logprob| of the sampled tokens, in nats.

    With equal weights and distributions only rounding remains, so a step beyond a bound stops the
    run. A non-finite difference always stops it.
    """

    enable: bool = True
    """false sets no bounds; for sampling cut by `top_p`, `top_k` or structured output."""
    mean: float | None = Field(default=None, gt=0)
    """Largest mean over a step's tokens; null: 1e-4 in float32, 0.1 in bfloat16, 0.5 in fp8."""
    max: float | None = Field(default=None, gt=0)
    """Largest difference of one token; null: 0.01 in float32, 10 in bfloat16, 20 in fp8."""


class RewardFunction(StrictModel):
    """A function that scores answers: `compute_score(data_source, solution_str, ...)`."""

    function: str = "exact"
    """A registered name (`exact`, `math`, ...) or `path/to/file.py:name`; the name defaults to
    `compute_score`.

    A file enters the fingerprint with what it imports: neighbouring modules (it runs with them from
    a copy in the store), versions of installed distributions, and modules of editable installs.
    Data files that it opens are not copied: give their absolute paths in `kwargs`."""
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of the function."""

    @property
    def file(self) -> Path | None:
        """The file of a reward given as a file; None for a registered name."""
        path, _, name = self.function.rpartition(":")
        if self.function.endswith(_PYTHON):
            return Path(self.function)
        return Path(path) if path.endswith(_PYTHON) and name.isidentifier() else None

    @property
    def function_in_file(self) -> str:
        """Name of the function in `file`."""
        path, _, name = self.function.rpartition(":")
        return name if path.endswith(_PYTHON) else "compute_score"

    def identity_values(self) -> dict[str, Any]:
        """Return the values of the fingerprint; a file counts only by its function name here."""
        return {
            **super().identity_values(),
            "function": self.function_in_file if self.file else self.function,
        }


class RewardComponent(RewardFunction):
    """One of the functions of a mixture."""

    weight: float = 1.0
    """Weight of its score in the sum."""


class RewardConfig(RewardFunction):
    """The reward: one function, or a weighted sum of several, which may depend on `data_source`."""

    components: dict[str, RewardComponent] = {}
    """Functions of a `mixture`, by a name of your choice, summed with their weights. Each score is
    also a metric and a GDPO component. If one leaves a sample unscored, the sample is unscored."""
    routes: dict[str, tuple[str, ...]] = {}
    """Components that score each `data_source`; `"*"` means all others. Empty: all score all."""
    accuracy: tuple[str, ...] = ()
    """Components that decide if an answer is correct, one per route: by the `acc` that they report,
    else by a score of 1 or more. A sum cannot decide it."""
    model: RewardModelConfig | None = None
    """Reward model (role `reward`) that scores each answer before any function; null: none. The
    function `model` returns its score; functions of the whole sample read `sample.model_score`."""
    judge: JudgeConfig | None = None
    """Language model asked about each answer before any function; null: none. The function `judge`
    returns the number in its reply; functions of the whole sample read `sample.judgement`."""
    environment: tuple[str, ...] = ()
    """Secret environment variables (`OPENAI_API_KEY`) that the function may see; no others."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one sample in seconds; a sample that misses it is unscored, not 0. Unlike other
    deadlines it counts for the fingerprint, because unscored samples do not train."""
    max_unscored_frac: float = Field(default=0.1, ge=0, le=1)
    """Share of unscored samples in a step above which the run stops."""
    num_workers: Annotated[int | None, NotIdentity] = Field(default=None, ge=1)
    """Scoring processes: samples scored at once. null: up to the cores of the job's machine, at
    most 16; one starts with the stage, the others when samples wait."""
    cache_size: Annotated[int, NotIdentity] = Field(default=0, ge=0)
    """Scores kept within a stage for repeated samples; for expensive deterministic functions."""

    @property
    def parts(self) -> dict[str, RewardFunction]:
        """Every function that scores, by its setting in a recipe."""
        if not self.components:
            return {"rl.reward": self}
        return {f"rl.reward.components.{name}": part for name, part in self.components.items()}

    @property
    def models(self) -> dict[str, JudgingModelConfig]:
        """The reward model and the judge that are set, by field."""
        asked: dict[str, JudgingModelConfig | None] = {"model": self.model, "judge": self.judge}
        return {name: model for name, model in asked.items() if model is not None}

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of all functions: `function`, and those of the components."""
        return tuple(dict.fromkeys((self.function, *(p.function for p in self.parts.values()))))

    def with_functions(self, functions: Mapping[str, str]) -> "RewardConfig":
        """Return a copy with other function names; `functions` has them by recipe setting."""
        components = {
            name: part.model_copy(
                update={"function": functions.get(f"rl.reward.components.{name}", part.function)}
            )
            for name, part in self.components.items()
        }
        return self.model_copy(
            update={
                "function": functions.get("rl.reward", self.function),
                "components": components,
            }
        )

    def _refusals(self) -> Refusals:
        yield (
            bool(self.components) != (self.function == MIXTURE),
            f"components: got {len(self.components)} with function {self.function}; need "
            f"function {MIXTURE} with one component or more, or neither",
        )
        for name in ("acc", "score"):
            yield (
                name in self.components,
                f"components: got one called {name}, which names the sum or the verdict; "
                "need another name",
            )
        routes = self.routes or ({"*": tuple(self.components)} if self.components else {})
        asked = {*self.accuracy, *(name for names in routes.values() for name in names)}
        for name in sorted(asked):
            yield (
                name not in self.components,
                f"components: none is called {name!r}; need one of "
                f"{', '.join(self.components) or 'none'}",
            )
        for source, names in routes.items():
            yield (
                len({*names} & {*self.accuracy}) != 1,
                f"accuracy: got {', '.join(self.accuracy) or 'none'}; need one of "
                f"{', '.join(names) or 'the components'}, which judge data_source {source!r}; "
                "name the one that says whether an answer is right",
            )


TOPK = "topk"
"""The loss that compares distributions; all others are estimators on sampled tokens."""


class ServedTeacherConfig(StrictModel):
    """Separate engines for the teacher, of the same kind as the policy's."""

    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Number of engines, on devices of their own; just one if it runs inside the job's process."""
    options: dict[str, Any] = {}
    """Options of the rollout engine, instead of the recipe's."""


class DistillationConfig(NamedModelConfig):
    """On-policy distillation (GKD, arXiv:2306.13649): a frozen teacher scores the policy's answers.

    Only the policy's tokens count; both distributions are at `rl.sampling.temperature`.
    """

    loss: str = TOPK
    """`topk`: KL from teacher to policy over the teacher's `num_top` likeliest tokens. Else a
    sampled-token KL from policy to teacher, as in `rl.algorithm.kl_loss_type` (`k2`, `k3+`)."""
    num_top: int = Field(default=64, ge=1)
    """Tokens per position that `topk` compares; 12 bytes each, for every token of a step."""
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket"
    """How `topk` treats other tokens. `bucket`: as one token with the remaining probability;
    `renormalise`: as if they did not exist; `ignore`: not at all (teaches too sharp a policy)."""
    loss_max_clamp: float | None = Field(default=None, gt=0)
    """Bound in nats, in both directions, on the loss of one token; null: no bound."""
    served: Annotated[ServedTeacherConfig | None, Execution] = None
    """Serve the teacher in rollout engines of its own, which need the capability `prompt_logprobs`;
    null: on the training ranks, in the policy's layout."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the teacher's loss."""
    policy_weight: float = Field(default=0.0, ge=0)
    """Weight of the algorithm's own loss, which uses rewards; 0: rewards are only metrics."""

    def _refusals(self) -> Refusals:
        yield (
            self.path is None,
            "path: missing; need the teacher, a model directory or a hub id; set it",
        )
