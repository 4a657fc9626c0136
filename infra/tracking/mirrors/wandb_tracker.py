"""Weights & Biases as a tracker, online or offline.

Points are stored locally first, and given to the library in parts: at the end of a run, and online
also every minute. Offline is the default without WANDB_API_KEY and WANDB_MODE; each part is then a
directory `<home>/wandb/<run>/part-<n>/wandb/offline-run-*` for `wandb sync --append`.
Promises: an interrupted part is written again, so offline a point is in one part; online the
service accepts no step twice. There are no terminal prompts.
Does not promise: history for a step that the service has already passed; such points, like headline
metrics, go to the summary. Between two parts the service shows the run as finished.
"""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra import env
from infra.frozen_model import FrozenModel
from infra.host.records import load_record, save_record
from infra.redact import redact
from infra.tracking.mirrors.directory_tracker import DirectoryTracker, StoredRun
from infra.tracking.tracker import MetricPoint, RunState, TrackerSettings

ONLINE, OFFLINE = "online", "offline"
PART_EVERY_S = 60.0
INIT_DEADLINE_S = 30.0
ID_DIGITS = 32


class HandedOver(FrozenModel):
    """Record of what the library has received of a run, in whole parts."""

    num_bytes: int = 0
    last_step: int = -1
    state: RunState = "RUNNING"
    num_parts: int = 0


class WandbTracker(DirectoryTracker):
    """A `Tracker` over Weights & Biases; `settings.experiment` is the project.

    `settings.uri` is the directory of points and offline parts, None means `<home>/wandb`.
    """

    points_name = "points.jsonl"

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(self.root_of(settings, "wandb"))
        self._project = settings.experiment
        self._part_at = time.monotonic()

    @property
    def mode(self) -> str:
        """Mode of the library: WANDB_MODE, else online with WANDB_API_KEY, offline without."""
        return env.WANDB_MODE.get() or (ONLINE if env.WANDB_API_KEY.get() else OFFLINE)

    def encode(self, run: StoredRun, points: Sequence[MetricPoint]) -> bytes:
        """Return one line of JSON per point."""
        return b"".join(json.dumps(asdict(point)).encode() + b"\n" for point in points)

    def names_in(self, path: Path, num_bytes: int) -> set[tuple[str, int]]:
        """Return (name, step) of the lines."""
        return {(point.name, point.step) for point in _points(path, 0, num_bytes)}

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Store the points; online, hand them over once a minute."""
        super().log_metrics(run_id, points, position)
        if self.mode == ONLINE and time.monotonic() - self._part_at >= PART_EVERY_S:
            self.hand_over(run_id)

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Store the state; hand the run over when it has ended."""
        super().set_state(run_id, state, tags, metrics)
        if state != "RUNNING":
            self.hand_over(run_id)

    def hand_over(self, run_id: str) -> None:
        """Send the library the points and state of a run that it lacks, as one part."""
        with self._alone():
            stored = self.run(run_id)
            record = self.root / run_id / "handed-over.json"
            done = load_record(record, HandedOver) or HandedOver()
            if (done.num_bytes, done.state) == (stored.num_bytes, stored.state):
                return
            points = _points(self.points_path(run_id), done.num_bytes, stored.num_bytes)
            part = self.root / run_id / f"part-{done.num_parts}"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._write(stored, points, done.last_step, part)
            told = HandedOver(
                num_bytes=stored.num_bytes,
                last_step=max([done.last_step, *(point.step for point in points)]),
                state=stored.state,
                num_parts=done.num_parts + 1,
            )
            save_record(record, told)
            self._part_at = time.monotonic()

    def _write(
        self, stored: StoredRun, points: Sequence[MetricPoint], last_step: int, part: Path
    ) -> None:
        if env.WANDB_ERROR_REPORTING.get() is None:
            env.set_for_process(env.WANDB_ERROR_REPORTING.name, "false")
        logging.getLogger("wandb").propagate = False  # wandb writes its own log file
        import wandb

        run = wandb.init(
            project=self._project,
            id=stored.key[:ID_DIGITS],
            name=stored.name,
            group=(stored.parent or stored.name).partition("/")[0],
            config=json.loads(redact(json.dumps(stored.params))),
            dir=str(part),
            mode=self.mode,  # pyright: ignore[reportArgumentType]  the user's own variable
            resume="allow" if self.mode == ONLINE else None,
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=INIT_DEADLINE_S,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        steps: dict[int, dict[str, float]] = {}
        for point in sorted(points, key=lambda point: point.step):
            if point.step > last_step:
                steps.setdefault(point.step, {})[point.name] = point.value
            else:
                run.summary[point.name] = point.value
        for step, values in steps.items():
            run.log(values, step=step)
        run.summary.update({f"rlhf/{name}": redact(text) for name, text in stored.tags.items()})
        run.finish(exit_code=int(stored.state in {"FAILED", "KILLED"}))


def _points(path: Path, start: int, end: int) -> list[MetricPoint]:
    """Read the points in a byte range; from the start if the file was rewritten."""
    data = path.read_bytes()[start if start <= end else 0 : end] if end else b""
    lines: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
    return [MetricPoint(**line) for line in lines]
