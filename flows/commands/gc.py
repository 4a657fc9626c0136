"""`rlhf gc`: list artifacts and work files that nothing refers to; `--delete` removes them.

Promises: models with an alias in the registry stay. If the registry does not answer, the command
ends before it removes anything. A registry that was never used is not contacted.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from engines.config.plugins import TRACKERS
from flows.run.registry import asking
from infra import env
from infra.errors import ConfigError
from infra.garbage import DAY_S, Collected, Limits, Survey, collect, survey
from infra.services.stack import tracking_address
from infra.store.runs import Runs
from infra.store.storage import open_storage
from infra.tracking.tracker import TrackerSettings

_AGE = re.compile(r"(\d+)([hd])")
_AGE_S = {"h": 3600.0, "d": DAY_S}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T)?B?")
_SIZE_BYTES = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(arguments: argparse.Namespace) -> int:
    """List what can be removed, and remove it if asked; the exit code is 1 if a removal failed."""
    home = env.home()
    storage = open_storage(arguments.store or str(home / "store"))
    limits = limits_of(arguments.unused, arguments.max_size)
    for names, kept in ((arguments.keep, True), (arguments.release, False)):
        for name in names:
            keep(storage.runs, name, kept=kept)
    found, done = survey(storage, storage.inventory, aliased(home), limits), None
    if arguments.delete:
        # Only for the removal: the survey of a large store takes long, and other processes wait.
        with storage.inventory.exclusively():
            done = collect(storage, storage.inventory, found)
    lines = [json.dumps(as_json(found, done))] if arguments.json else as_text(found, done)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if done is not None and done.problems else 0


def limits_of(unused: str, max_size: str | None) -> Limits:
    """Parse an age (`36h`, `30d`; at least a day) and a size (`500GB`) into seconds and bytes.

    Raises:
        ConfigError: a value is invalid; names the argument.
    """
    age = _AGE.fullmatch(unused)
    if age is None or int(age[1]) * _AGE_S[age[2]] < DAY_S:
        raise ConfigError("--unused", f"got {unused!r}; need a day or more, e.g. 36h or 30d")
    size = None if max_size is None else _SIZE.fullmatch(max_size)
    if max_size is not None and size is None:
        raise ConfigError("--max-size", f"got {max_size!r}; need a size, e.g. 500GB")
    max_bytes = None if size is None else int(float(size[1]) * _SIZE_BYTES[size[2]])
    return Limits(int(age[1]) * _AGE_S[age[2]], max_bytes)


def keep(runs: Runs, name: str, *, kept: bool) -> None:
    """Set or clear the keep mark of all runs with a name, as `rlhf run` prints it.

    Raises:
        ConfigError: the store has no such run.
    """
    found = [run for run in runs.known() if run.name == name]
    if not found:
        known = ", ".join(sorted({run.name for run in runs.known()})) or "none"
        raise ConfigError(
            "--keep" if kept else "--release", f"got {name!r}; need a run of this store: {known}"
        )
    for run in found:
        runs.keep(run.key, kept)


def aliased(home: Path) -> Mapping[str, str]:
    """Return the models that have an alias in the registry, by digest.

    Raises:
        ServiceError: the registry does not answer.
    """
    tracker = TRACKERS.load("mlflow")(TrackerSettings(home, tracking_address(home)))
    then = "start it, or name another one with MLFLOW_TRACKING_URI"
    with asking(tracker, "which models have an alias", then):
        return {d: f"registered as {alias}" for d, alias in tracker.aliased().items()}


def as_text(found: Survey, done: Collected | None) -> Iterator[str]:
    """Yield lines for a terminal: one for each thing to remove, then totals."""
    for stage in found.goes:
        size = stage.log.size_bytes + stage.work.size_bytes
        what = stage.name or "half-trained"
        yield _line(what, stage.fingerprint, size, found.at - stage.used_at)
    for digest, stored in found.artifacts:
        kind = stored.place.split("/")[1]
        yield _line(f"{kind} files", digest, stored.size_bytes, found.at - stored.touched_at)
    for stored in found.rests:
        yield f"{'left behind':<20} {size_text(stored.size_bytes):>9}  {stored.place}"
    yield from (
        f"stays: {stage.name or 'stage'} {stage.fingerprint[:12]}, {stage.needed_by}"
        for stage in found.stays
        if stage.needed_by
    )
    total = f"of {size_text(found.total_bytes)}"
    if done is None:
        goes = f"{size_text(found.freed_bytes)} {total} would go"
        yield f"{goes}; add --delete to remove it" if found.freed_bytes else f"nothing {total} goes"
        return
    yield from (f"kept, since it is needed now: {place}" for place in done.spared)
    yield from (f"could not be removed: {problem}" for problem in done.problems)
    yield f"{size_text(done.freed_bytes)} {total} removed"


def as_json(found: Survey, done: Collected | None) -> dict[str, object]:
    """Return the result as a JSON object."""
    return {
        "total_bytes": found.total_bytes,
        "freed_bytes": found.freed_bytes if done is None else done.freed_bytes,
        "deleted": done is not None,
        "stages": [
            {"name": stage.name, "fingerprint": stage.fingerprint, "used_at": stage.used_at}
            for stage in found.goes
        ],
        "artifacts": [stored.place for _, stored in found.artifacts],
        "left_behind": [stored.place for stored in found.rests],
        "needed": {stage.fingerprint: stage.needed_by for stage in found.stays if stage.needed_by},
        "spared": list(done.spared) if done else [],
        "problems": list(done.problems) if done else [],
    }


def size_text(num_bytes: int) -> str:
    """Return a size in decimal units, e.g. `1.5 GB`."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _line(what: str, name: str, size_bytes: int, unused_s: float) -> str:
    size = size_text(size_bytes)
    return f"{what:<20} {size:>9}  {name[:12]}  unused for {unused_s / DAY_S:.0f} days"
