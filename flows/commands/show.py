"""`rlhf show`: an offline page of the samples that a run's policy wrote, step by step.

An unfinished run is shown up to its current step. The content comes from the store; the tracking
ledger is read only to translate run ids of a tracker.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.report.samples import PAGE_NAME, ShownRun, samples_page, shown_run
from infra import env
from infra.errors import ConfigError
from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.canonical import sha256_json
from infra.store.runs import KnownRun
from infra.store.storage import Storage, open_storage
from infra.tracking.history import StageHistory
from infra.tracking.ledger import told_runs

ROUND = "rl_round"
MIN_DIGITS = 6


def main(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    home = env.home()
    storage = open_storage(arguments.store or str(home / "store"))
    history = StageHistory(storage)
    shown = [_shown(arguments.run, "RUN", home, history)]
    name = PAGE_NAME
    if arguments.against:
        shown.append(_shown(arguments.against, "--against", home, history))
        name = f"against-{shown[1].name}.html"
    path = Path(arguments.out) if arguments.out else home / "runs" / shown[0].name / name
    make_directories(path.absolute().parent)
    atomic_write_bytes(path, samples_page(shown).encode())
    sys.stdout.write(f"{path}\n")
    return 0


def _shown(asked: str | None, argument: str, home: Path, history: StageHistory) -> ShownRun:
    run, only = find_run(history.storage, home, asked, argument)
    rounds = sorted(_rounds(history, run, only))
    shown = shown_run(run.name, [fingerprint for *_, fingerprint in rounds], history)
    if not shown.num_steps and not any(shown.curves.values()):
        raise ConfigError(
            argument,
            f"{run.name} has no step of RL to show; wait for its first one, or name another run",
        )
    return shown


def find_run(
    storage: Storage, home: Path, asked: str | None, argument: str
) -> tuple[KnownRun, str]:
    """Find a run; return it and the fingerprint of the stage that was asked for, empty for all.

    Args:
        home: its trackers' run ids are accepted, too.
        asked: name of a run, id of its Prefect flow run, a tracker's id of the run or of one of its
            stages, or the beginning of a stage's fingerprint; None: the latest run.
        argument: name of the argument, for the error.

    Raises:
        ConfigError: there is no such run.
    """
    known = sorted(storage.runs.known(), key=lambda run: max(run.used_at.values(), default=0.0))
    if asked is None and known:
        return known[-1], ""
    told = [
        entry
        for entry in (told_runs(home) if asked else ())
        if asked in {entry.run_id, entry.tags.get("flow_run_id")}
    ]
    keys = {sha256_json({"flow_run_id": asked}), *(entry.parent or entry.key for entry in told)}
    for run in reversed(known):
        if asked == run.name or run.key in keys:
            return run, next((entry.fingerprint for entry in told), "")
    for run in reversed(known) if asked and len(asked) >= MIN_DIGITS else ():
        for fingerprint in run.used_at:
            if fingerprint.startswith(asked or ""):
                return run, fingerprint
    names = ", ".join(dict.fromkeys(run.name for run in reversed(known))) or "none yet"
    got = repr(asked) if asked else "no run"
    raise ConfigError(argument, f"got {got}; need a run of this store: {names}")


def _rounds(history: StageHistory, run: KnownRun, only: str) -> Iterator[tuple[int, float, str]]:
    """Yield number, last use and fingerprint of each round; the newest if a number occurs twice."""
    newest: dict[int, tuple[float, str]] = {}
    for fingerprint, used_at in run.used_at.items():
        if only and only != fingerprint:
            continue
        spec = history.specification(fingerprint)
        if spec is not None and spec.stage == ROUND:
            number = int(spec.config["round"])
            newest[number] = max(newest.get(number, (0.0, "")), (used_at, fingerprint))
    yield from ((number, *found) for number, found in newest.items())
