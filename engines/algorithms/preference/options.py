"""Options of the losses over preferences, and of a reward model's. No torch."""

from pydantic import Field

from engines.config.base import StrictModel


class PairOptions(StrictModel):
    """Of a loss over pairs: the base of its options."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the column `ref_logprobs`."""
        return True


class SigmoidOptions(PairOptions):
    """Of `sigmoid`."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference: rewards are beta times log-ratios."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be labelled the wrong way round; 0 believes all labels."""
    likelihood_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's negative log-probability, a mean over its tokens, beside the
    comparison (arXiv:2404.19733 eq. 1), which alone may make both answers less likely."""
    reference_free: bool = False
    """Compare log-probabilities instead of log-ratios: every answer is as likely to the reference
    as any other."""

    @property
    def needs_reference(self) -> bool:
        """Unless it is `reference_free`."""
        return not self.reference_free


class IpoOptions(PairOptions):
    """Of `ipo`."""

    beta: float = Field(default=0.1, gt=0)
    """The paper's tau: the margin aimed at is 1 / (2 beta), in nats per token."""


class SimpoOptions(PairOptions):
    """Of `simpo`."""

    beta: float = Field(default=2.0, gt=0)
    """Rewards are beta times the mean log-probability of a token; the paper takes 2 to 2.5."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin by which the chosen answer's reward has to be larger; the paper takes 0.3 to 1.6."""

    @property
    def needs_reference(self) -> bool:
        """It has none."""
        return False


class OrpoOptions(PairOptions):
    """Of `orpo`."""

    beta: float = Field(default=0.1, gt=0)
    """The paper's lambda: weight of the odds ratio beside the likelihood of the chosen answer."""

    @property
    def needs_reference(self) -> bool:
        """It has none."""
        return False


class KtoOptions(StrictModel):
    """Of `kto`."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of a good answer. The paper wants it times their number to be 1 to 4/3 times the same
    of the bad ones."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of a bad one."""


class RewardModelOptions(StrictModel):
    """Of `bradley_terry`."""

    margin_coef: float = Field(default=0.0, ge=0)
    """Times the row `margin`, this is by how much the chosen score has to be larger; 0 reads no
    margins."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of a pull of each pair's scores towards a sum of 0, which a comparison leaves
    open (arXiv:2312.09244); TRL recommends 0.01."""
