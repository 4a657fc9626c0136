"""`rlhf show` and `rlhf diagnose`: offline pages about a run.

`show` writes the samples of the run's policy, step by step; `diagnose` writes findings in the order
resources, communication, algorithm. An unfinished run is read up to its current step. The content
comes from the store; the tracking ledger is read only to translate run ids of a tracker.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from engines.config.recipe import DiagnosisConfig
from flows.diagnosis import diagnosis as diagnoses
from flows.diagnosis.findings import run_views
from flows.report.report import RECIPE_JSON
from flows.report.samples import PAGE_NAME, ShownRun, samples_page, shown_run
from infra import env
from infra.errors import ConfigError
from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.canonical import sha256_json
from infra.store.runs import KnownRun
from infra.store.storage import Storage, open_storage
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import told_runs

ROUND = "rl_round"
MIN_DIGITS = 6


def main(arguments: argparse.Namespace) -> int:
    """Write the page of samples and print its path."""
    home, history = _opened(arguments)
    shown = [_shown(arguments.run, "RUN", home, history)]
    if arguments.against:
        shown.append(_shown(arguments.against, "--against", home, history))
    name = f"against-{shown[1].name}.html" if arguments.against else PAGE_NAME
    path = Path(arguments.out) if arguments.out else home / "runs" / shown[0].name / name
    make_directories(path.absolute().parent)
    atomic_write_bytes(path, samples_page(shown).encode())
    sys.stdout.write(f"{path}\n")
    return 0


def diagnose(arguments: argparse.Namespace) -> int:
    """Write the page of findings and print them; the exit code is 1 if one is no mere note.

    The thresholds are those of the run's recipe, or the defaults if this home has no such run.
    """
    home, history = _opened(arguments)
    run, only = find_run(history.storage, home, arguments.run, "RUN")
    views = run_views(history, run, only)
    if not views:
        raise ConfigError("RUN", f"{run.name} has no stage with a specification; run it first")
    directory = home / "runs" / run.name
    recipe = directory / RECIPE_JSON
    thresholds = json.loads(recipe.read_bytes()).get("diagnosis", {}) if recipe.exists() else {}
    diagnosis = diagnoses.diagnose(run.name, views, DiagnosisConfig.model_validate(thresholds))
    make_directories(directory)
    path = diagnoses.write_diagnosis(diagnosis, directory)
    text = f"{diagnoses.text(diagnosis)}\n{path}"
    if arguments.json:
        findings = [asdict(finding) for finding in diagnosis.findings]
        text = json.dumps({"run": run.name, "findings": findings}, indent=2)
    sys.stdout.write(f"{text}\n")
    return 1 if diagnosis.ills else 0


def _opened(arguments: argparse.Namespace) -> tuple[Path, StageHistory]:
    home = env.home()
    return home, StageHistory(open_storage(arguments.store or str(home / "store")))


def _shown(asked: str | None, argument: str, home: Path, history: StageHistory) -> ShownRun:
    run, only = find_run(history.storage, home, asked, argument)
    newest: dict[int, tuple[float, str]] = {}
    for fingerprint, used_at in run.used_at.items():
        spec = history.specification(fingerprint) if only in {"", fingerprint} else None
        if spec is not None and spec.stage == ROUND:
            number = int(spec.config["round"])
            newest[number] = max(newest.get(number, (0.0, "")), (used_at, fingerprint))
    shown = shown_run(run.name, [newest[number][1] for number in sorted(newest)], history)
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
