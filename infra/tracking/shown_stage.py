"""What a stage made and wrote, told a tracker for whoever looks at the run.

Promises: a tracker that refuses one of these is told everything else, and the user is told once; of
samples it gets a bounded number; a store that has an output no longer costs its manifest alone.
Does not promise: samples of a stage that still runs. `rlhf show` has them.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from infra.errors import ArtifactError
from infra.redact import redact
from infra.store.artifacts import Manifest
from infra.tracking.history import StageHistory
from infra.tracking.ledger import RunEntry
from infra.tracking.samples import read_samples, within
from infra.tracking.tracker import TrackedOutput, Tracker, TrackerRefusedError

MAX_SAMPLES = 128
"""Of a stage; a step that kept more shows so many."""
MAX_SAMPLES_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


def show_stage(tracker: Tracker, history: StageHistory, entry: RunEntry, run_id: str) -> None:
    """Tell a tracker what a stage that ended made, and what its policy wrote.

    Args:
        tracker: is told.
        history: of the stages.
        entry: of the stage.
        run_id: of the stage on the tracker.
    """
    if entry.output is not None:
        manifest: Manifest | None = None
        with suppress(ArtifactError):
            manifest = history.storage.verify(entry.output, "manifest")
        output = TrackedOutput(entry.name, entry.output, manifest, entry.metrics)
        _try(f"show what {entry.name} made", partial(tracker.log_output, run_id, output))
    kept = read_samples(history.storage, entry.fingerprint, entry.generation)
    first = {step: each.samples[:MAX_SAMPLES] for step, each in kept.items()}
    if steps := within(first, MAX_SAMPLES_BYTES, MAX_SAMPLES):
        records, _ = history.records(entry.fingerprint, "", entry.generation)
        times_ms = {each.step: each.time_ms for each in records if each.step is not None}
        samples = partial(tracker.log_samples, run_id, steps, times_ms)
        _try(f"show the samples of {entry.name}", samples)


def _try(what: str, tell: Callable[[], None]) -> None:
    try:
        tell()
    except TrackerRefusedError as error:
        said = redact(" ".join(str(error).split()))[:200]
        _log.warning("tracking: the tracker refused to %s: %s", what, said)
