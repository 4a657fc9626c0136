"""Runs in MLflow: one per pipeline, one below it per stage, with their lineage.

Promises: each journal record is in the store once, however often it is shipped and whoever was
killed in between: a metric carries its journal time, and MLflow keeps one row per (name, step,
time, value); the consumed offset is a tag of the run, so nothing is replayed without need. A
stage run is found by its tags before it is created. Nothing here raises into a stage.
Does not promise: that MLflow is there. What could not be sent is sent by the next call.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra import env
from infra.host.processes import ProcessIdentity, is_alive, own_identity
from infra.store.stage_spec import Artifact
from infra.tracking.mlflow_connection import MlflowConnection, flatten, log_params
from infra.tracking.model_registry import RegisteredVersion, aliased_version, register_version
from infra.tracking.stage_run import TAG, RunStatus, StageRun

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


class Tracker:
    """The experiment of one home.

    Args:
        uri: of the tracking server, or `sqlite:////absolute/path` for the embedded database.
        artifact_root: where an embedded experiment keeps its files.
        experiment: its name.
        retry_after_s: seconds for which a store that failed is not asked again.
    """

    def __init__(
        self,
        uri: str,
        artifact_root: Path | str,
        experiment: str = "rlhf",
        *,
        retry_after_s: float = 60.0,
    ) -> None:
        self.uri = uri
        self._connection = MlflowConnection(uri, retry_after_s)
        self._artifact_root = Path(artifact_root).absolute()
        self._experiment = experiment
        self._experiment_id: str | None = None
        self._owner = _owner_tag(own_identity())
        self._run_name = ""

    @classmethod
    def open(cls, home: Path, uri: str | None = None, experiment: str = "rlhf") -> "Tracker":
        """The tracker of a home: `uri`, else MLFLOW_TRACKING_URI, else its embedded database."""
        home = home.absolute()
        uri = uri or env.MLFLOW_TRACKING_URI.get() or f"sqlite:///{home / 'mlflow.db'}"
        return cls(uri, home / "mlflow-artifacts", experiment)

    def warm_up(self) -> None:
        """Import MLflow and open the store in the background."""
        self._connection.warm_up()

    def start_pipeline(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        resume: bool = False,
    ) -> str | None:
        """Start the run of a pipeline, or continue one.

        Runs of this host whose process is gone are ended as KILLED on the way.

        Args:
            name: name of the pipeline run.
            params: its settings; nested ones get dotted names.
            tags: a `flow_run_id` that has a run already continues it.
            resume: continue the newest run of this name, if there is one.

        Returns:
            The run's id; None if MLflow is not there now.
        """
        self._run_name = name

        def start(client: "MlflowClient") -> str:
            experiment_id = self._open_experiment(client)
            self._end_abandoned(client, experiment_id)
            full_tags = {TAG + key: value for key, value in tags.items()}
            full_tags |= {TAG + "owner": self._owner, TAG + "pipeline": name}
            run_id = self._find_pipeline(client, experiment_id, tags.get("flow_run_id"), resume)
            if run_id is None:
                run = client.create_run(experiment_id, tags=full_tags, run_name=name)
                run_id = run.info.run_id
                log_params(client, run_id, flatten(params))
            else:
                client.update_run(run_id, status="RUNNING")
                client.set_tag(run_id, TAG + "owner", self._owner)
            return run_id

        return self._connection.call("start the run of the pipeline", start)

    def finish_pipeline(
        self, run_id: str | None, status: RunStatus, metrics: Mapping[str, float] | None = None
    ) -> None:
        """End the run of a pipeline.

        Args:
            run_id: from `start_pipeline`; None does nothing.
            status: how it ended.
            metrics: headline numbers of the whole run.
        """
        if run_id is None:
            return

        def finish(client: "MlflowClient") -> None:
            for key, value in (metrics or {}).items():
                client.log_metric(run_id, key, value)
            client.set_terminated(run_id, status)

        self._connection.call("end the run of the pipeline", finish)

    def stage_run(
        self,
        parent_run_id: str | None,
        stage: str,
        fingerprint: str,
        params: Mapping[str, Any],
        inputs: Mapping[str, str],
    ) -> StageRun:
        """The run of a stage below its pipeline's run; found by its tags, or created.

        Args:
            parent_run_id: from `start_pipeline`; None makes a run without parent.
            stage: name of the stage within the pipeline (`rl_round_2`).
            fingerprint: its identity.
            params: its settings; nested ones get dotted names.
            inputs: digests of what it reads, by name.

        Returns:
            The run; without an id yet if MLflow is not there now.
        """
        tags = {
            TAG + "stage": stage,
            TAG + "fingerprint": fingerprint,
            TAG + "run_name": self._run_name,
            TAG + "owner": self._owner,
        }
        if parent_run_id is not None:
            tags["mlflow.parentRunId"] = parent_run_id
        tags |= {f"{TAG}input.{name}": digest for name, digest in inputs.items()}
        run = StageRun(self._connection, self._open_experiment, stage, tags, params, inputs)
        run.open()
        return run

    def log_artifacts(self, run_id: str | None, directory: Path, path: str | None = None) -> None:
        """Store the files of a directory with a run.

        Args:
            run_id: a run; None does nothing.
            directory: local files.
            path: directory within the run's artifacts.
        """
        if run_id is not None:
            self._connection.call(
                f"store {directory}",
                lambda client: client.log_artifacts(run_id, str(directory), path),
            )

    def register_model(
        self,
        name: str,
        alias: str,
        artifact: Artifact,
        run_id: str | None,
        metrics: Mapping[str, float],
    ) -> str | None:
        """Register a model as a version, once per digest, and give it the alias.

        Args:
            name: of the registered model.
            alias: moves to this version (`champion`).
            artifact: the model.
            run_id: the run that made it.
            metrics: headline numbers, kept as tags of the version.

        Returns:
            The version; None if MLflow is not there now.
        """
        is_server = self._connection.is_server

        def register(client: "MlflowClient") -> str:
            return register_version(
                client, name, alias, artifact, run_id, metrics, upload=is_server
            )

        return self._connection.call(f"register the model {name}", register)

    def registered_model(self, name: str, alias: str) -> RegisteredVersion | None:
        """The version that bears an alias; None if none does or MLflow is not there."""
        return self._connection.call(
            f"look up {name}@{alias}", lambda client: aliased_version(client, name, alias)
        )

    def _open_experiment(self, client: "MlflowClient") -> str:
        if self._experiment_id is None:
            self._experiment_id = _ensure_experiment(
                client,
                self._experiment,
                # A server decides by itself; embedded, MLflow would use the current directory.
                None if self._connection.is_server else self._artifact_root.as_uri(),
            )
        return self._experiment_id

    def _find_pipeline(
        self, client: "MlflowClient", experiment_id: str, flow_run_id: str | None, resume: bool
    ) -> str | None:
        tag, value = ("flow_run_id", flow_run_id) if flow_run_id else ("pipeline", self._run_name)
        if not flow_run_id and not resume:
            return None
        found = client.search_runs(
            [experiment_id],
            f"tags.`{TAG}{tag}` = '{value}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return found[0].info.run_id if found else None

    def _end_abandoned(self, client: "MlflowClient", experiment_id: str) -> None:
        """A killed process cannot end its runs; without this they would be RUNNING for ever."""
        running = client.search_runs(
            [experiment_id], filter_string="attributes.status = 'RUNNING'", max_results=200
        )
        for run in running:
            owner = run.data.tags.get(TAG + "owner", "")
            if owner != self._owner and _is_gone(owner):
                client.set_terminated(run.info.run_id, "KILLED")


def _ensure_experiment(client: "MlflowClient", name: str, location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _owner_tag(identity: ProcessIdentity) -> str:
    return f"{socket.gethostname()}/{identity.pid}/{identity.started}"


def _is_gone(owner: str) -> bool:
    """Whether a process of this host that owned a run has ended; False for other hosts."""
    host, _, process = owner.partition("/")
    pid, _, started = process.partition("/")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    return not is_alive(ProcessIdentity(pid=int(pid), started=started))
