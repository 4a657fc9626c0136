"""Options of preference losses, and of a reward model's loss. No torch."""

from pydantic import Field

from engines.config.base import StrictModel


class PairOptions(StrictModel):
    """Base of the options of losses over pairs."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the column `ref_logprobs`."""
        return True


class SigmoidOptions(PairOptions):
    """Options of `sigmoid`."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference: rewards are beta times log-ratios."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels; 0 trusts all labels."""
    likelihood_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's negative log-probability, a mean over its tokens, added because
    the comparison alone may make both answers less likely (arXiv:2404.19733 eq. 1)."""
    reference_free: bool = False
    """Compare log-probabilities instead of log-ratios."""

    @property
    def needs_reference(self) -> bool:
        """True unless `reference_free`."""
        return not self.reference_free


class IpoOptions(PairOptions):
    """Options of `ipo`."""

    beta: float = Field(default=0.1, gt=0)
    """The paper's tau: the target margin is 1 / (2 beta), in nats per token."""


class SimpoOptions(PairOptions):
    """Options of `simpo`."""

    beta: float = Field(default=2.0, gt=0)
    """Rewards are beta times the mean log-probability of a token; the paper uses 2 to 2.5."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin by which the chosen answer's reward must be larger; the paper uses 0.3 to 1.6."""

    @property
    def needs_reference(self) -> bool:
        """False."""
        return False


class OrpoOptions(PairOptions):
    """Options of `orpo`."""

    beta: float = Field(default=0.1, gt=0)
    """The paper's lambda: weight of the odds ratio, relative to the chosen answer's likelihood."""

    @property
    def needs_reference(self) -> bool:
        """False."""
        return False


class KtoOptions(StrictModel):
    """Options of `kto`."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of a good answer. In the paper, this times the number of good answers is 1 to 4/3
    times `undesirable_weight` times the number of bad ones."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of a bad answer."""


class RewardModelOptions(StrictModel):
    """Options of `bradley_terry`."""

    margin_coef: float = Field(default=0.0, ge=0)
    """Factor of the row `margin`, by which the chosen score must be larger; 0 reads no margins."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of a penalty on the sum of a pair's scores, which a comparison does not determine
    (arXiv:2312.09244); TRL recommends 0.01."""
