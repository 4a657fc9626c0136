"""MLflow as a tracker: runs of one experiment, with their lineage.

Promises: MLflow is imported at the first call (two seconds of CPU); an embedded database is
complete or absent (`infra.tracking.mlflow_database`), and one process at a time creates runs in it;
a metric carries its journal time, and MLflow keeps one row per (name, step, time, value), so
sending a row again has no effect.
Does not promise: one run per key if two machines create it through a server at the same moment; all
then use the older one.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra import env
from infra.names import flattened
from infra.redact import redact
from infra.tracking.mlflow_database import database_lock, ensure_whole
from infra.tracking.mlflow_lineage import (
    aliased_digests,
    headline_rows,
    incumbent_of,
    log_inputs,
    log_output,
    log_traces,
    metric_key,
    model_of,
    register_version,
)
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

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

TAG = "rlhf."
KEY_TAG = TAG + "key"
POSITION_TAG = TAG + "journal_position"
DESCRIBED_TAG = TAG + "described"
"""Set once settings and inputs of a run are complete."""
SQLITE = "sqlite:///"
METRICS_PER_CALL = 500
"""Calls with 20 rows reach a tenth of the throughput of calls with hundreds."""
PARAMS_PER_CALL = 100
MAX_PARAM_CHARS = 500
_REFUSALS = frozenset(
    {
        *("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED"),
        *("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"),
    }
)
"""Error codes of a working server that rejects a call."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise a rejection by MLflow as TrackerRefusedError; other errors mean it is unreachable.

    Sets MLflow's variables that have to be set before its import.
    """
    for variable, value in (
        (env.MLFLOW_HTTP_REQUEST_MAX_RETRIES, "1"),
        (env.MLFLOW_HTTP_REQUEST_TIMEOUT, "5"),
        (env.MLFLOW_DISABLE_TELEMETRY, "true"),
        # Otherwise a server's client prints two lines at the end of each run.
        (env.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT, "true"),
    ):
        if variable.get() is None:
            env.set_for_process(variable.name, value)
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in _REFUSALS:
            raise TrackerRefusedError(str(error)) from error
        raise


class MlflowTracker:
    """An MLflow server (`http(s)://...`), or an embedded database (`sqlite:////absolute/path`).

    Without `settings.uri` it uses MLFLOW_TRACKING_URI, else `<home>/mlflow.db`.
    """

    def __init__(self, settings: TrackerSettings) -> None:
        uri = settings.uri or env.MLFLOW_TRACKING_URI.get() or f"{SQLITE}{settings.home}/mlflow.db"
        self._database: Path | None = None
        if uri.startswith(SQLITE):
            path, *query = uri.removeprefix(SQLITE).partition("?")
            self._database = Path(path).resolve()
            uri = f"{SQLITE}{self._database}{''.join(query)}"
        self.uri = uri
        self._files = settings.home / "mlflow-artifacts"
        self._experiment = settings.experiment

    @property
    def address(self) -> str:
        """URI of the server or database, and the experiment."""
        return f"{self.uri}#{self._experiment}"

    def is_absent(self) -> bool:
        """True if an embedded database does not exist."""
        return self._database is not None and not self._database.exists()

    @_refusals()
    def origin(self) -> str:
        """Return the experiment's id and creation time."""
        with self._writing():
            experiment = self._client.get_experiment(self._experiment_id)
            return f"{experiment.experiment_id} {experiment.creation_time}"

    @_refusals()
    def open_run(self, run: TrackedRun) -> str:
        """Return the id of the run with this key, the oldest if there are several."""
        with self._writing():
            found = self._find(run.key) or self._create(run)
            run_id, known = found.info.run_id, found.data.params
            if DESCRIBED_TAG in found.data.tags:
                return run_id
            from mlflow.entities import Param

            flat = flatten(run.params).items()
            params = [Param(key, value) for key, value in flat if key not in known]
            for start in range(0, len(params), PARAMS_PER_CALL):
                self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
            if run.inputs:
                log_inputs(self._client, found, run.inputs)
            self._client.set_tag(run_id, DESCRIBED_TAG, "true")
            return run_id

    @_refusals()
    def position(self, run_id: str) -> str:
        """Return the position in the run's tag."""
        return self._client.get_run(run_id).data.tags.get(POSITION_TAG, "")

    @_refusals()
    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        """Send rows in batches, then the position; after a kill the rows are sent again."""
        from mlflow.entities import Metric

        rows = [Metric(metric_key(p.name), p.value, p.time_ms, p.step) for p in points]
        for start in range(0, len(rows), METRICS_PER_CALL):
            self._client.log_batch(run_id, metrics=rows[start : start + METRICS_PER_CALL])
        self._client.set_tag(run_id, POSITION_TAG, position)

    @_refusals()
    def set_state(
        self,
        run_id: str,
        state: RunState,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
    ) -> None:
        """Set the state; headline metrics are rows at step 0 with the run's start time."""
        from mlflow.entities import RunTag

        run = self._client.get_run(run_id)
        run_tags = [RunTag(TAG + name, value) for name, value in tags.items()]
        self._client.log_batch(run_id, metrics=headline_rows(run, metrics), tags=run_tags)
        if state == "RUNNING":
            self._client.update_run(run_id, status=state)
        elif run.info.status != state:
            self._client.set_terminated(run_id, state)

    @_refusals()
    def log_output(self, run_id: str, output: TrackedOutput) -> None:
        """Log the output as a logged model or a dataset."""
        with self._writing():
            log_output(self._client, self._client.get_run(run_id), output)

    @_refusals()
    def log_samples(
        self,
        run_id: str,
        steps: Mapping[int, Sequence[KeptSample]],
        times_ms: Mapping[int, int],
    ) -> None:
        """Log the samples as traces."""
        log_traces(self.uri, self._client.get_run(run_id), steps, times_ms)

    @_refusals()
    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        """Log the files as artifacts of the run."""
        self._client.log_artifacts(run_id, str(directory), path)

    @_refusals()
    def register(self, candidate: ModelCandidate) -> str:
        """Register the model as a version that MLflow's API can load."""
        with self._writing():
            run = self._client.get_run(candidate.run_id)
            model_id = model_of(self._client, run, candidate.artifact)
            return register_version(self._client, candidate, model_id)

    def incumbent(self, name: str, alias: str) -> Incumbent | None:
        """Return the registry's current version; does not create a missing database."""
        if self.is_absent():
            return None
        with _refusals(), self._writing():
            return incumbent_of(self._client, name, alias)

    def aliased(self) -> dict[str, str]:
        """Return the aliases of registered models whose version has a digest tag."""
        if self.is_absent():
            return {}
        with _refusals(), self._writing():
            return aliased_digests(self._client)

    def _writing(self) -> Any:
        """Return the machine-wide lock of an embedded database; no lock for a server."""
        _ = self._client  # its creation takes the same lock
        return nullcontext() if self._database is None else database_lock(self._database)

    @cached_property
    def _client(self) -> "MlflowClient":
        from mlflow.tracking import MlflowClient

        # The caller reports a failure in one line; these loggers print SQL tracebacks.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with database_lock(self._database) if self._database else nullcontext():
            if self._database:
                ensure_whole(self._database)
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)  # creates the default experiment
        return client

    @cached_property
    def _experiment_id(self) -> str:
        # A server has its own location; an embedded MLflow would use the working directory.
        location = self._files.as_uri() if self._database else None
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return self._client.create_experiment(self._experiment, location)
            except MlflowException:
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:  # else another machine was faster
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _create(self, run: TrackedRun) -> "Run":
        tags = {
            **{TAG + name: value for name, value in run.tags.items()},
            **{f"{TAG}input.{name}": each.digest for name, each in run.inputs.items()},
            KEY_TAG: run.key,
        }
        if run.parent_id:
            tags["mlflow.parentRunId"] = run.parent_id
        created = self._client.create_run(self._experiment_id, tags=tags, run_name=run.name)
        found = self._find(run.key) or created
        if found.info.run_id != created.info.run_id:
            self._client.delete_run(created.info.run_id)
        return found

    def _find(self, key: str) -> "Run | None":
        found: Sequence[Run] = self._client.search_runs(
            [self._experiment_id],
            f"tags.`{KEY_TAG}` = '{key}'",
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
            max_results=1,
        )
        return found[0] if found else None


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested settings to dotted keys and short texts, secrets masked."""
    return {
        metric_key(name): redact(str(value))[:MAX_PARAM_CHARS]
        for name, value in flattened(values).items()
    }
