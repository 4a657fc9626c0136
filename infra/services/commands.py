"""Command line, environment and address of each server of `rlhf up`.

Promises: each listens on 127.0.0.1 only, keeps its data below the home and sends no telemetry. The
worker is restarted when it ends, and its flow runs send heartbeats.
"""

import sys
from pathlib import Path

from infra import env
from infra.host.servers import ServerCommand

WORK_POOL = "rlhf-pool"
HEARTBEAT_S = 30  # Prefect's minimum


def prefect_server(home: Path, port: int) -> ServerCommand:
    """Return the command of the Prefect server; its database is `<home>/prefect/prefect.db`."""
    url = f"http://127.0.0.1:{port}/api"
    return ServerCommand(
        name="prefect",
        argv=(
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ),
        environment=env.child_environment(
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=url,
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            # In memory, a restarted server would lose the slots and end the runs that hold them.
            PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=(
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def mlflow_server(home: Path, port: int) -> ServerCommand:
    """Return the command of the MLflow server; runs without a server write to the same database."""
    url = f"http://127.0.0.1:{port}"
    return ServerCommand(
        name="mlflow",
        argv=(
            *(sys.executable, "-m", "infra.tracking.mlflow_database", str(home / "mlflow.db")),
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"),
            *("--artifacts-destination", str(home / "mlflow-artifacts")),
        ),
        environment=env.child_environment(
            # The job runner and queue consumers take 0.65 GB and are not used here.
            MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
            MLFLOW_DISABLE_TELEMETRY="true",
            MLFLOW_TRACKING_URI=None,
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def process_worker(home: Path, prefect_url: str, mlflow_url: str) -> ServerCommand:
    """Return the command of the Prefect worker, which creates its work pool if it is missing."""
    return ServerCommand(
        name="worker",
        argv=(
            *(sys.executable, "-m", "infra.services.keeper"),
            *(sys.executable, "-m", "prefect", "--no-prompt", "worker", "start"),
            *("--pool", WORK_POOL, "--type", "process", "--name", f"worker-{home.name}"),
        ),
        environment=env.child_environment(
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=prefect_url,
            # Prefect's own default is pickle.
            PREFECT_RESULTS_DEFAULT_SERIALIZER="json",
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY=str(HEARTBEAT_S),
            MLFLOW_TRACKING_URI=mlflow_url,
            RLHF_HOME=str(home),
            DO_NOT_TRACK="1",
        ),
        url=prefect_url,
    )
