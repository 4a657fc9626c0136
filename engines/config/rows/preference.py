"""Preference losses by name; imports none of them."""

from dataclasses import dataclass

from infra.plugin_table import PluginTable
from infra.plugins import Row


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """A preference loss.

    Attributes:
        paper: source of the formula.
        paired: it compares the two answers of a pair (`PairInputs` to `PairLoss`). Else it judges
            each answer alone against a reference point of the whole step, like
            `engines.algorithms.preference.kto.kto_loss`.
    """

    paper: str = ""
    paired: bool = True


_PAIRS = "engines.algorithms.preference.pair_losses"
_OPTIONS = "engines.algorithms.preference.options"
PREFERENCE_LOSSES = PluginTable(
    "preference_loss",
    "preference.loss",
    [
        PreferenceRow(
            name="sigmoid",
            target=f"{_PAIRS}:sigmoid_loss",
            options=f"{_OPTIONS}:SigmoidOptions",
            paper="DPO, arXiv:2305.18290 eq. 7",
        ),
        PreferenceRow(
            name="ipo",
            target=f"{_PAIRS}:ipo_loss",
            options=f"{_OPTIONS}:IpoOptions",
            paper="arXiv:2310.12036 eq. 17",
        ),
        PreferenceRow(
            name="simpo",
            target=f"{_PAIRS}:simpo_loss",
            options=f"{_OPTIONS}:SimpoOptions",
            paper="arXiv:2405.14734 eq. 6",
        ),
        PreferenceRow(
            name="orpo",
            target=f"{_PAIRS}:orpo_loss",
            options=f"{_OPTIONS}:OrpoOptions",
            paper="arXiv:2403.07691 eq. 6 and 7",
        ),
        PreferenceRow(
            name="kto",
            target="engines.algorithms.preference.kto:kto_loss",
            options=f"{_OPTIONS}:KtoOptions",
            paper="arXiv:2402.01306 eq. 8",
            paired=False,
        ),
    ],
    PreferenceRow,
)

BRADLEY_TERRY = PreferenceRow(
    name="bradley_terry",
    target="engines.algorithms.preference.reward_objective:bradley_terry_loss",
    options=f"{_OPTIONS}:RewardModelOptions",
    paper="arXiv:2204.05862; margins arXiv:2307.09288 eq. 2; centering arXiv:2312.09244",
)
"""The only loss of a reward model, so no setting names it."""
