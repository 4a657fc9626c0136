"""The MLflow run of one stage: parameters, metrics from the journal, inputs and output.

Promises and limits are those of `infra.tracking.tracker`, which makes these.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from infra.errors import JournalError
from infra.store.stage_spec import Artifact
from infra.tracking.journal import JournalRecord
from infra.tracking.mlflow_connection import MlflowConnection, flatten, log_params, metric_key

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

JournalReader = Callable[[Mapping[int, int]], tuple[list[JournalRecord], dict[int, int]]]
"""Gives the records behind byte positions by attempt, and the new positions."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
TAG = "rlhf."
"""Prefix of every tag of ours."""
OFFSET_TAG = TAG + "journal_offset"
METRICS_PER_CALL = 500
"""Ten times fewer rows per second arrive in calls of 20 than in calls of hundreds."""
SHIP_EVERY_S = 2.0


class StageRun:
    """A stage's run; it is created as soon as MLflow is there.

    Args:
        connection: to MLflow.
        open_experiment: gives the experiment's id.
        name: of the run.
        tags: identify the run; it is found by parent, stage and fingerprint.
        params: settings of the stage.
        inputs: digests of what the stage reads, by name.
    """

    def __init__(
        self,
        connection: MlflowConnection,
        open_experiment: Callable[["MlflowClient"], str],
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        inputs: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self._open_experiment = open_experiment
        self._name = name
        self._tags = dict(tags)
        self._params = params
        self._inputs = inputs
        self._positions: dict[int, int] | None = None
        self._shipped_at = -SHIP_EVERY_S
        self._journal: JournalReader | None = None
        self.run_id: str | None = None

    def open(self) -> str | None:
        """The run's id, found or created now if need be; None while MLflow is not there."""
        if self.run_id is None:
            self.run_id = self._connection.call(f"open the run of {self._name}", self._find)
        return self.run_id

    def ship(self, journal: JournalReader, *, now: bool = False) -> bool:
        """Send what the journal has gained.

        Args:
            journal: reads the stage's journal.
            now: also if the last time is less than two seconds ago.

        Returns:
            Whether everything in the journal is in MLflow.
        """
        self._journal = journal
        due = time.monotonic() - self._shipped_at >= SHIP_EVERY_S
        run_id = self.open() if due or now else None
        if run_id is None:
            return False
        self._shipped_at = time.monotonic()

        def send(client: "MlflowClient") -> bool:
            if self._positions is None:
                tags = client.get_run(run_id).data.tags
                self._positions = {
                    int(attempt): at
                    for attempt, at in json.loads(tags.get(OFFSET_TAG, "{}")).items()
                }
            try:
                records, positions = journal(self._positions)
            except JournalError:
                # Not the journal that was shipped before. Sending all of it doubles nothing.
                records, positions = journal({})
            metrics = _metrics(records)
            for start in range(0, len(metrics), METRICS_PER_CALL):
                client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
            # Last: who is killed before this sends the same rows again, and they count once.
            if positions != self._positions:
                client.set_tag(run_id, OFFSET_TAG, json.dumps(positions))
                self._positions = positions
            return True

        return bool(self._connection.call(f"take the metrics of {self._name}", send))

    def finish(
        self,
        status: RunStatus,
        output: Artifact | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        reused: bool = False,
    ) -> None:
        """Send the rest of the journal that was shipped from, and end the run.

        Args:
            status: how the stage ended.
            output: what it published.
            metrics: its headline metrics; those that the journal brought already are left.
            reused: the output was there before this pipeline asked for it.
        """
        run_id = self.open()
        if run_id is None:
            return
        if self._journal is not None:
            self.ship(self._journal, now=True)

        def end(client: "MlflowClient") -> None:
            from mlflow.entities import Metric, RunTag

            run = client.get_run(run_id)
            known = run.data.metrics
            tags = {TAG + "reused": str(reused).lower()}
            if output is not None:
                tags |= {
                    TAG + "output.digest": output.digest,
                    TAG + "output.kind": output.kind,
                    TAG + "output.uri": output.uri,
                }
            # The run's own start as their time: a second call writes the same rows.
            rows = [
                Metric(metric_key(key), float(value), run.info.start_time, 0)
                for key, value in (metrics or {}).items()
                if metric_key(key) not in known
            ]
            client.log_batch(run_id, metrics=rows, tags=[RunTag(k, v) for k, v in tags.items()])
            client.set_terminated(run_id, status)

        self._connection.call(f"end the run of {self._name}", end)

    def _find(self, client: "MlflowClient") -> str:
        experiment_id = self._open_experiment(client)
        keys = (TAG + "stage", TAG + "fingerprint", "mlflow.parentRunId")
        query = " and ".join(f"tags.`{k}` = '{self._tags[k]}'" for k in keys if k in self._tags)
        found = client.search_runs([experiment_id], query, max_results=1)
        if found:
            run_id = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
            client.set_tag(run_id, TAG + "owner", self._tags[TAG + "owner"])
            return run_id
        run = client.create_run(experiment_id, tags=self._tags, run_name=self._name)
        self._describe(client, run.info.run_id)
        return run.info.run_id

    def _describe(self, client: "MlflowClient", run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        log_params(client, run_id, flatten(self._params))
        datasets = [
            DatasetInput(
                # MLflow's digest has 36 characters at most; the whole one goes into a tag.
                Dataset(name, digest[:36], source_type="artifact", source=digest),
                [InputTag("mlflow.data.context", name), InputTag("digest", digest)],
            )
            for name, digest in self._inputs.items()
        ]
        if datasets:
            client.log_inputs(run_id, datasets=datasets)


def _metrics(records: list[JournalRecord]) -> "list[Metric]":
    from mlflow.entities import Metric

    return [
        Metric(metric_key(name), value, record.time_ms, record.step or 0)
        for record in records
        if record.kind == "metrics"
        for name, value in record.values.items()
    ]
