"""Sends the output, samples and promotion of a finished stage to a tracker.

Promises: if a tracker refuses one item, a warning says so and the others are still sent. The
number of samples is bounded. If the store has lost an output, only its manifest is missing. A
committed promotion registers a model, in whichever process sees it first; the alias moves only from
the incumbent that the model was compared with, so a late decision does not replace a newer one.
Does not promise: samples of a running stage; `rlhf show` has them.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from infra.errors import ArtifactError
from infra.redact import redact
from infra.store.artifacts import Manifest
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import RunEntry
from infra.tracking.promotion import CHALLENGER, INCUMBENT, Decision
from infra.tracking.samples import read_samples, within
from infra.tracking.tracker import (
    ModelCandidate,
    TrackedOutput,
    Tracker,
    TrackerRefusedError,
)

MAX_SAMPLES = 128
"""Limit per stage; a single step is cut to it."""
MAX_SAMPLES_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


def show_stage(tracker: Tracker, history: StageHistory, entry: RunEntry, run_id: str) -> None:
    """Send the output and the samples of a finished stage to its run on the tracker."""
    if entry.output is not None:
        manifest: Manifest | None = None
        with suppress(ArtifactError):
            manifest = history.storage.verify(entry.output, "manifest")
        output = TrackedOutput(entry.name, entry.output, manifest, entry.metrics)
        _try(f"show what {entry.name} made", partial(tracker.log_output, run_id, output))
    kept = read_samples(history.storage, entry.fingerprint, entry.generation)
    first = {step: samples[:MAX_SAMPLES] for step, samples in kept.items()}
    if steps := within(first, MAX_SAMPLES_BYTES, MAX_SAMPLES):
        records, _ = history.records(entry.fingerprint, "", entry.generation)
        times_ms = {each.step: each.time_ms for each in records if each.step is not None}
        samples = partial(tracker.log_samples, run_id, steps, times_ms)
        _try(f"show the samples of {entry.name}", samples)


def register(tracker: Tracker, history: StageHistory, entry: RunEntry, run_id: str) -> None:
    """Register the model of a committed promotion, if it gets an alias; may raise ArtifactError."""
    if entry.output is None or "model" not in entry.inputs:
        return
    decision = Decision.read(history.storage.local_copy(entry.output))
    alias, model = decision.given_alias, entry.inputs["model"]
    if not alias:
        return
    incumbent = tracker.incumbent(decision.model_name, decision.alias)
    if incumbent is not None and incumbent.artifact.digest == model.digest:
        return
    beaten = decision.comparison.incumbent_digest if decision.comparison else None
    if decision.promoted and incumbent is not None and incumbent.artifact.digest != beaten:
        alias = CHALLENGER
        _log.warning(
            "promote: version %s of %s became %s meanwhile; this model is registered as %s: "
            "run the recipe again to compare it with that one",
            *(incumbent.version, decision.model_name, decision.alias, alias),
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


def _try(what: str, tell: Callable[[], None]) -> None:
    try:
        tell()
    except TrackerRefusedError as error:
        said = redact(" ".join(str(error).split()))[:200]
        _log.warning("tracking: the tracker refused to %s: %s", what, said)
