"""`rl.algorithm.options` of this project's estimators and losses. No torch."""

from pydantic import Field, model_validator

from engines.config.base import StrictModel


class DiscountOptions(StrictModel):
    """Of estimators over returns to go."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of what a later token earns."""


class GaeOptions(DiscountOptions):
    """Of `gae`: plain, decoupled, and length-adaptive."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Of the advantages; see also `length_adaptive_alpha`."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """Of the critic's targets; null uses `lam`. VAPO (arXiv:2504.05118) takes 1.0 here."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """VAPO: the advantages of an answer of l tokens take ``lam = 1 - 1 / (alpha l)``; null: `lam`.
    The paper's alpha is 0.05."""
    bootstrap_truncated: bool = True
    """An answer that was cut at the length limit is not over: the critic's value behind its last
    token stands for what it would still have earned. False ends it there, for scores that judge an
    answer as it was cut."""
    whiten: bool = True
    """Advantages of a step have mean 0 and variance 1."""


class GpgOptions(StrictModel):
    """Of the estimator `gpg`."""

    f_norm: float = Field(default=1.0, gt=0)
    """Divides the centred scores."""


class GdpoOptions(StrictModel):
    """Of `gdpo`."""

    gdpo_reward_keys: tuple[str, ...] | None = None
    """Components of the score that count, which every sample has to have; null: all of a mixture
    whose routes have the same. `score` and `acc` may be named too."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """One for each key; null: that of the mixture, and 1 for what is no component of it."""

    @model_validator(mode="after")
    def _check_weights(self) -> "GdpoOptions":
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights is not None and keys is None:
            raise ValueError(
                f"gdpo_reward_weights: got {list(weights)}; need gdpo_reward_keys, which they are "
                "of; set both"
            )
        if keys is not None and weights is not None and len(keys) != len(weights):
            raise ValueError(
                f"gdpo_reward_weights: got {len(weights)}; need {len(keys)}, one for each of "
                "gdpo_reward_keys"
            )
        return self


class RaftOptions(StrictModel):
    """Of `raft`."""

    raft_num_kept: int = Field(default=1, ge=1)
    """Distinct answers to each prompt that are trained on, the best first."""
    raft_min_reward: float | None = None
    """An answer that earned less is not kept, whatever the others earned: 1.0 keeps right ones.
    null: any, so that of wrong answers one is the best."""


class SapoOptions(StrictModel):
    """Of `sapo`."""

    tau_pos: float = Field(default=1.0, gt=0)
    """Sharpness of the gate where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """The same where it is negative."""


class DroOptions(StrictModel):
    """Of `dro`."""

    dro_beta: float = Field(default=0.1, gt=0)
    """Strength of the quadratic pull towards the old policy."""


class ClipCovOptions(StrictModel):
    """Of `clip_cov`."""

    clip_cov_ratio: float = Field(default=2e-4, ge=0, le=1)
    """Share of the step's tokens that lose their gradient."""
    clip_cov_lb: float = 1.0
    """Only tokens whose covariance lies above it are taken."""
    clip_cov_ub: float = 5.0
    """And below it."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ClipCovOptions":
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb: got {self.clip_cov_lb}; need less than clip_cov_ub "
                f"{self.clip_cov_ub}"
            )
        return self


class KlCovOptions(StrictModel):
    """Of `kl_cov`."""

    kl_cov_ratio: float = Field(default=2e-4, ge=0, le=1)
    """Share of the step's tokens, those of the largest covariance, that are held back."""
    ppo_kl_coef: float = Field(default=1.0, ge=0)
    """How much they are held back."""
