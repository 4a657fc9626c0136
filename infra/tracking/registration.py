"""The decision of a gate, told a tracker that keeps a registry of models.

Promises: a committed promotion is what registers a model, whoever sees it first; the alias moves
only from the incumbent that the model was compared with, if there is one: a decision that is told
late takes nothing from a later champion.
"""

import logging

from infra.tracking.history import StageHistory
from infra.tracking.ledger import RunEntry
from infra.tracking.promotion import CHALLENGER, INCUMBENT, Decision
from infra.tracking.tracker import ModelCandidate, Tracker

_log = logging.getLogger(__name__)


def register(tracker: Tracker, history: StageHistory, entry: RunEntry, run_id: str) -> None:
    """Register the model that a committed promotion decided about, if it gets an alias.

    Args:
        tracker: is told.
        history: of the stages.
        entry: of the promotion.
        run_id: of the promotion on the tracker.

    Raises:
        ArtifactError: the decision or the model cannot be read.
    """
    if entry.output is None or "model" not in entry.inputs:
        return
    decision = Decision.read(history.storage.local_copy(entry.output))
    alias, model = decision.given_alias, entry.inputs["model"]
    if not alias:
        return
    bearer = tracker.incumbent(decision.model_name, decision.alias)
    if bearer is not None and bearer.artifact.digest == model.digest:
        return
    beaten = decision.comparison.incumbent_digest if decision.comparison else None
    if decision.promoted and bearer is not None and bearer.artifact.digest != beaten:
        alias = CHALLENGER
        _log.warning(
            "promote: version %s of %s became %s meanwhile; this model is registered as %s: "
            "run the recipe again to compare it with that one",
            *(bearer.version, decision.model_name, decision.alias, alias),
        )
    candidate = ModelCandidate(
        name=decision.model_name,
        alias=alias,
        artifact=model,
        directory=history.storage.local_copy(model),
        run_id=run_id,
        metrics=entry.metrics,
        beat=entry.inputs.get(INCUMBENT) if alias == decision.alias else None,
    )
    tracker.register(candidate)
