"""The smallest tracker there can be: a file of JSON lines. It proves the seam.

Every call appends one line under a lock; what a run is now is what all lines say together.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.host.records import file_lock
from infra.store.stage_spec import Artifact
from infra.tracking.samples import KeptSample
from infra.tracking.tracker import (
    Incumbent,
    MetricPoint,
    ModelCandidate,
    RunState,
    TrackedOutput,
    TrackedRun,
    TrackerRefusedError,
    TrackerSettings,
)


class JsonLinesTracker:
    """An `infra.tracking.tracker.Tracker` over `<home>/runs.jsonl`."""

    def __init__(self, settings: TrackerSettings) -> None:
        self.path = settings.home / "runs.jsonl"

    @property
    def address(self) -> str:
        """The file."""
        return str(self.path.absolute())

    def is_absent(self) -> bool:
        """Whether nobody wrote yet."""
        return not self.path.exists()

    def origin(self) -> str:
        """The first line is the file's own name for itself."""
        with self._lock():
            if self.is_absent():
                self._append({"origin": uuid.uuid4().hex})
        return self._lines()[0]["origin"]

    def open_run(self, run: TrackedRun) -> str:
        """Runs are called by their keys."""
        self.origin()
        with self._lock():
            if not any(line.get("key") == run.key for line in self._lines()):
                inputs = {name: each.digest for name, each in run.inputs.items()}
                described = {"params": run.params, "tags": run.tags, "inputs": inputs}
                self._append({"key": run.key, "parent": run.parent_id, **described})
        return run.key

    def position(self, run_id: str) -> str:
        """Of the last line that has one."""
        found = [line["position"] for line in self._of(run_id) if "position" in line]
        return found[-1] if found else ""

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Points and position are one line: both are there, or neither."""
        with self._lock():
            known = {tuple(p.values()) for line in self._of(run_id) for p in line.get("points", ())}
            new = [asdict(p) for p in points if tuple(asdict(p).values()) not in known]
            self._append({"run": run_id, "points": new, "position": position})

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        """Later lines win."""
        with self._lock():
            if not self._of(run_id):
                raise TrackerRefusedError(f"{run_id}: nobody opened such a run")
            self._append({"run": run_id, "state": state, "tags": tags, "metrics": metrics})

    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """Its digest and its kind."""
        with self._lock():
            told = {"output": output.artifact.digest, "kind": output.artifact.kind}
            self._append({"run": run_id, **told})

    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Names by step."""
        with self._lock():
            names = {step: [sample.name for sample in each] for step, each in steps.items()}
            self._append({"run": run_id, "samples": names})

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Copied beside the lines."""
        shutil.copytree(directory, self.path.parent / run_id / path, dirs_exist_ok=True)

    def register(self, candidate: ModelCandidate) -> str:
        """The number of a model among those of its name."""
        with self._lock():
            lines = [line for line in self._lines() if line.get("model") == candidate.name]
            digests = list(dict.fromkeys(line["digest"] for line in lines))
            digest = candidate.artifact.digest
            number = str([*digests, digest].index(digest) + 1)
            line = {"model": candidate.name, "digest": digest, "alias": candidate.alias}
            beat = candidate.beat.model_dump() if candidate.beat else None
            told = {"number": number, "artifact": candidate.artifact.model_dump(), "beat": beat}
            self._append(line | told)
            return number

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """Later lines win."""
        with self._lock():
            lines = [x for x in self._lines() if (x.get("model"), x.get("alias")) == (name, alias)]
        if not lines:
            return None
        artifact, beat = lines[-1]["artifact"], lines[-1]["beat"]
        return Incumbent(
            lines[-1]["number"],
            Artifact.model_validate(artifact),
            Artifact.model_validate(beat) if beat else None,
        )

    def aliased(self) -> dict[str, str]:
        """Later lines win."""
        with self._lock():
            lines = [line for line in self._lines() if "model" in line]
        newest = {f"{line['model']}@{line['alias']}": line["digest"] for line in lines}
        return {digest: alias for alias, digest in newest.items()}

    def run(self, run_id: str) -> dict[str, Any]:
        """A run as it stands, as `test_tracker` reads one."""
        lines = self._of(run_id)
        metrics = [(p["name"], p["step"], p["value"]) for x in lines for p in x.get("points", ())]
        headline = {k: v for line in lines for k, v in line.get("metrics", {}).items()}
        known = {name for name, _, _ in metrics}
        metrics += [(name, 0, value) for name, value in headline.items() if name not in known]
        states = [line["state"] for line in lines if "state" in line]
        return {
            "state": states[-1] if states else "RUNNING",
            "parent": next((line["parent"] for line in lines if "parent" in line), None),
            "tags": {k: v for line in lines for k, v in line.get("tags", {}).items()},
            "metrics": sorted(metrics),
        }

    def _lock(self) -> Any:
        return file_lock(self.path.with_suffix(".lock"), 30)

    def _of(self, run_id: str) -> list[dict[str, Any]]:
        return [line for line in self._lines() if run_id in (line.get("run"), line.get("key"))]

    def _lines(self) -> list[dict[str, Any]]:
        text = "" if self.is_absent() else self.path.read_text()
        return [json.loads(line) for line in text.splitlines()]

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
