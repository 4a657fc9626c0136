"""`rl.algorithm.options` of the built-in estimators and losses. No torch."""

from pydantic import Field

from engines.config.base import Refusals, StrictModel


class DiscountOptions(StrictModel):
    """Options of estimators with returns to go."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token of later rewards."""


class GaeOptions(DiscountOptions):
    """Options of `gae`: plain, decoupled, and length-adaptive."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the advantages; see also `length_adaptive_alpha`."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets; null uses `lam`. VAPO (arXiv:2504.05118) uses 1.0."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """VAPO: advantages of an answer of l tokens use ``lam = 1 - 1 / (alpha l)``, with alpha 0.05 in
    the paper; null uses `lam`."""
    bootstrap_truncated: bool = True
    """An answer cut at the length limit continues with the critic's value after its last token.
    False ends it there, for scores that judge the cut answer."""
    whiten: bool = True
    """Give the advantages of a step mean 0 and variance 1."""


class GpgOptions(StrictModel):
    """Options of `gpg`."""

    f_norm: float = Field(default=1.0, gt=0)
    """Divisor of the centred scores."""


class GdpoOptions(StrictModel):
    """Options of `gdpo`."""

    gdpo_reward_keys: tuple[str, ...] | None = None
    """Components of the score that count, which every sample must have; null: all of a
    mixture, if all of its routes have the same. `score` and `acc` are allowed too."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """One per key; null: the mixture's weight, and 1 for a key that it does not have."""

    def _refusals(self) -> Refusals:
        if self.gdpo_reward_weights is not None:
            keys, weights = self.gdpo_reward_keys or (), self.gdpo_reward_weights
            yield (
                self.gdpo_reward_keys is None,
                f"gdpo_reward_weights: got {list(weights)}; need gdpo_reward_keys too, one for "
                "each weight; set both",
            )
            yield (
                len(keys) != len(weights),
                f"gdpo_reward_weights: got {len(weights)}; need {len(keys)}, one for each of "
                "gdpo_reward_keys",
            )


class RaftOptions(StrictModel):
    """Options of `raft`."""

    raft_num_kept: int = Field(default=1, ge=1)
    """Largest number of distinct answers per prompt that are trained on, the best first."""
    raft_min_reward: float | None = None
    """Answers with a smaller reward are never kept; null keeps the best one even if it is wrong."""


class SapoOptions(StrictModel):
    """Options of `sapo`."""

    tau_pos: float = Field(default=1.0, gt=0)
    """Sharpness of the gate where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Sharpness of the gate elsewhere."""


class DroOptions(StrictModel):
    """Options of `dro`."""

    dro_beta: float = Field(default=0.1, gt=0)
    """Strength of the quadratic pull towards the old policy."""


class ClipCovOptions(StrictModel):
    """Options of `clip_cov`."""

    clip_cov_ratio: float = Field(default=2e-4, ge=0, le=1)
    """Largest share of the step's tokens that lose their gradient."""
    clip_cov_lb: float = 1.0
    """Tokens with a smaller covariance keep their gradient."""
    clip_cov_ub: float = 5.0
    """Tokens with a larger covariance keep their gradient."""

    def _refusals(self) -> Refusals:
        yield (
            self.clip_cov_lb >= self.clip_cov_ub,
            f"clip_cov_lb: got {self.clip_cov_lb}; need less than clip_cov_ub {self.clip_cov_ub}",
        )


class KlCovOptions(StrictModel):
    """Options of `kl_cov`."""

    kl_cov_ratio: float = Field(default=2e-4, ge=0, le=1)
    """Share of the step's tokens, those of the largest covariance, that are penalised."""
    ppo_kl_coef: float = Field(default=1.0, ge=0)
    """Coefficient of the penalty."""
