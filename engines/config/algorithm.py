"""The RL algorithm: estimators and losses by the names that users of verl know."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.base import NotIdentity, StrictModel
from engines.config.model import JudgeConfig, JudgingModelConfig, RewardModelConfig

MIXTURE = "mixture"
"""Name of the reward that is made of components."""
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
    """Generation batches one step may spend to fill itself; then it trains on what it has."""


class OverlongConfig(StrictModel):
    """DAPO soft overlong punishment: a linear penalty in the last `buffer_length` tokens."""

    enable: bool = False
    buffer_length: int = Field(default=16, ge=1)
    penalty_factor: float = Field(default=1.0, ge=0)


class PfPpoConfig(StrictModel):
    """PF-PPO (arXiv:2409.06957): the answers to each prompt are drawn again by their rewards."""

    enable: bool = False
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: float = Field(default=2.0, gt=0)
    """Exponent of `pow`."""


class KlControlConfig(StrictModel):
    """The coefficient of a KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the KL of a step to `target_kl` (arXiv:1909.08593 sec. 2.2)."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, or the first one."""
    horizon: float = Field(default=10_000, gt=0)
    """Samples over which an error of the KL changes the coefficient by its own factor."""
    target_kl: float = Field(default=0.1, gt=0)
    """Nats per token, averaged over each answer and then over the answers of a step."""


class AlgorithmConfig(StrictModel):
    """One policy-gradient algorithm, put together from registered parts."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO (arXiv:2503.20783), to be paired with `seq-mean-token-sum-norm`."""
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
    """`kl`|`k1`, `abs`, `mse`|`k2`, `low_var_kl`|`k3`; a trailing `+` takes the k2 gradient."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference off the reward of each token."""
    kl_penalty: str = "kl"
    """Its estimator; names as of `kl_loss_type`, without `+`: it has no gradient."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    positive_nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of right answers (VAPO, arXiv:2504.05118 sec. 4.3)."""
    pf_ppo: PfPpoConfig = PfPpoConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong: OverlongConfig = OverlongConfig()
    options: dict[str, Any] = {}
    """Options of the estimator or loss, validated by it."""

    @property
    def needs_reference(self) -> bool:
        """True if a part reads logprobs of the reference."""
        return self.use_kl_loss or self.use_kl_in_reward

    @model_validator(mode="after")
    def _check_clip(self) -> "AlgorithmConfig":
        low = self.clip_ratio_low or self.clip_ratio
        if low >= 1:
            raise ValueError(f"clip_ratio_low: got {low}; need < 1 (the clip is at 1 - it)")
        return self


class MismatchConfig(StrictModel):
    """Bounds of |rollout logprob - training logprob| of the sampled tokens, in nats.

    Where both use the same weights and distribution only rounding is left, so a step beyond a
    bound stops the run. So does a difference that is no finite number, whatever is set here.
    """

    enable: bool = True
    """False bounds nothing, for a sampling distribution that is cut by `top_p`, `top_k` or a
    form of the answers."""
    mean: float | None = Field(default=None, gt=0)
    """Over the sampled tokens of a step; null is 1e-4 in float32 and 0.1 in bfloat16."""
    max: float | None = Field(default=None, gt=0)
    """Largest logprob difference of one token; null: 0.01 in float32, 10 in bfloat16."""


class RewardFunction(StrictModel):
    """A function that judges answers: `compute_score(data_source, solution_str, ...)`."""

    function: str = "exact"
    """A registered name (`exact`, `math`, ...) or `path/to/file.py:name`; without a name: the
    file's `compute_score`.

    A file counts with what it imports: modules beside it, with which it runs from a copy in the
    store, the versions of installed distributions, and the modules of what is installed editable.
    Data files that it opens are not copied: give their absolute paths in `kwargs`.
    """
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of the function."""

    @property
    def file(self) -> Path | None:
        """The file of a reward that is given as one; None for a registered name."""
        path, _, name = self.function.rpartition(":")
        if self.function.endswith(_PYTHON):
            return Path(self.function)
        return Path(path) if path.endswith(_PYTHON) and name.isidentifier() else None

    @property
    def function_in_file(self) -> str:
        """The name of the function in `file`."""
        path, _, name = self.function.rpartition(":")
        return name if path.endswith(_PYTHON) else "compute_score"

    def identity_values(self) -> dict[str, Any]:
        """Values of the fingerprint; of a file only the name of the function, not the path."""
        function = self.function_in_file if self.file else self.function
        return {**super().identity_values(), "function": function}


class RewardComponent(RewardFunction):
    """One of the functions of a mixture."""

    weight: float = 1.0
    """Weight of its score in the sum."""


class RewardConfig(RewardFunction):
    """The reward: one function, or a weighted sum of several, by `data_source` if asked."""

    components: dict[str, RewardComponent] = {}
    """Of `function: mixture`, by a name of your choice. The score is the sum of weight times score;
    each score is reported under its name: a metric, and a component for GDPO. A sample that one of
    its components leaves unscored is unscored."""
    routes: dict[str, tuple[str, ...]] = {}
    """Which components judge the rows of a `data_source`; `"*"` stands for every other one. Empty:
    all components judge all rows."""
    accuracy: tuple[str, ...] = ()
    """The components that say whether an answer is right, one for each route: by the `acc` that it
    reports, else by a score of 1 or more. A sum says nothing of that."""
    model: RewardModelConfig | None = None
    """A model that judges each answer before any function does: the role `reward`. The function
    `model` returns what it said; functions that see the whole sample read `sample.model_score`."""
    judge: JudgeConfig | None = None
    """A language model that is asked about each answer before any function is. The function `judge`
    returns the number in what it wrote; the whole sample has it as `sample.judgement`."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that hold a secret (`OPENAI_API_KEY`) and that the function
    may see; every other one is withheld from it."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one sample; a sample that misses it is unscored, not 0. It counts for the
    stage's identity, as other deadlines do not: what is unscored does not train."""
    max_unscored_frac: float = Field(default=0.1, ge=0, le=1)
    """Share of unscored samples in a step above which the run stops."""
    num_workers: Annotated[int | None, NotIdentity] = Field(default=None, ge=1)
    """Scoring processes: how many samples are judged at once. Null: at most 16 and as many as the
    job's machine has cores, of which one starts with the stage and others when samples wait."""
    cache_size: Annotated[int, NotIdentity] = Field(default=0, ge=0)
    """Scores kept for samples that come again, within a stage; for a function that always judges a
    sample alike, and costs much."""

    @property
    def parts(self) -> dict[str, RewardFunction]:
        """Every function that judges, by its setting in a recipe."""
        if not self.components:
            return {"rl.reward": self}
        return {f"rl.reward.components.{name}": part for name, part in self.components.items()}

    @property
    def models(self) -> dict[str, JudgingModelConfig]:
        """The models that are asked before the functions, by their field."""
        asked: dict[str, JudgingModelConfig | None] = {"model": self.model, "judge": self.judge}
        return {name: model for name, model in asked.items() if model is not None}

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the parts and of the mixture."""
        parts = (part.function for part in self.parts.values())
        return tuple(dict.fromkeys((self.function, *parts)))

    def with_functions(self, functions: Mapping[str, str]) -> "RewardConfig":
        """The same with other functions, by the setting of their part."""
        components = {
            name: part.model_copy(
                update={"function": functions.get(f"rl.reward.components.{name}", part.function)}
            )
            for name, part in self.components.items()
        }
        function = functions.get("rl.reward", self.function)
        return self.model_copy(update={"function": function, "components": components})

    @model_validator(mode="after")
    def _check_mixture(self) -> "RewardConfig":
        if bool(self.components) != (self.function == MIXTURE):
            got = "components" if self.components else "none"
            raise ValueError(
                f"components: got {got} with function {self.function}; need function {MIXTURE} "
                "with one component or more, or neither"
            )
        if reserved := sorted({"score", "acc"} & self.components.keys()):
            raise ValueError(
                f"components: got one called {reserved[0]}, which names the sum or the verdict; "
                "need another name"
            )
        routes = self.routes or ({"*": tuple(self.components)} if self.components else {})
        asked = {*self.accuracy, *(name for names in routes.values() for name in names)}
        if unknown := sorted(asked - self.components.keys()):
            raise ValueError(
                f"components: none is called {unknown[0]!r}; need one of "
                f"{', '.join(self.components) or 'none'}"
            )
        for source, names in routes.items():
            if len({*names} & {*self.accuracy}) != 1:
                raise ValueError(
                    f"accuracy: got {', '.join(self.accuracy) or 'none'}; need one of "
                    f"{', '.join(names) or 'the components'}, which judge data_source {source!r}; "
                    "name the one that says whether an answer is right"
                )
        return self
