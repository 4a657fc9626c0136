"""The loss function that a configuration of preference training names."""

from collections.abc import Mapping
from typing import Any

from engines.algorithms.parts import options_as
from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.options import KtoOptions, PairOptions
from engines.algorithms.preference.pair_objective import PairObjective
from engines.config.options import own_options
from engines.config.rows.preference import PREFERENCE_LOSSES
from infra.plugins import load_row


def preference_objective(loss: str, options: Mapping[str, Any]) -> PairObjective | KtoObjective:
    """Return the loss of that name: over pairs, or over single answers.

    Raises:
        ConfigError: there is no such loss, or it does not have these options.
        TypeError: its row names the schema of another kind of loss.
    """
    row = PREFERENCE_LOSSES.find(loss)
    own = own_options(options, row, "preference.options")
    function = load_row(row, PREFERENCE_LOSSES.setting)
    if row.paired:
        return PairObjective(function, options_as(PairOptions, own))
    return KtoObjective(options_as(KtoOptions, own), function)
