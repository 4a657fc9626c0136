"""How the servers of `rlhf up` are started: command line, environment, address.

Promises: each listens on 127.0.0.1 only, keeps its data below the home and reports to nobody
outside; the worker is started again when it ends, and whoever it runs says that it lives.
"""

import sys
from pathlib import Path

from infra import env
from infra.host.servers import ServerCommand

WORK_POOL = "rlhf-pool"
HEARTBEAT_S = 30
"""How often a flow run says that it lives; Prefect allows no less."""


def prefect_server(home: Path, port: int) -> ServerCommand:
    """The Prefect server; its database is `<home>/prefect/prefect.db`.

    Args:
        home: of the services.
        port: a free one.

    Returns:
        The command.
    """
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
            # In memory, a server that starts again would end the runs whose slots it forgot.
            PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=(
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def mlflow_server(home: Path, port: int) -> ServerCommand:
    """The MLflow server, over the database that runs without a server write to as well.

    Args:
        home: of the services.
        port: a free one.

    Returns:
        The command.
    """
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
            # Its job runner and queue consumers take 0.65 GB, and nothing here uses them.
            MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
            MLFLOW_DISABLE_TELEMETRY="true",
            MLFLOW_TRACKING_URI=None,
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def process_worker(home: Path, prefect_url: str, mlflow_url: str) -> ServerCommand:
    """The worker that runs deployments as processes; it creates its work pool if need be.

    Args:
        home: of the services, and of the runs it starts.
        prefect_url: API address of its server.
        mlflow_url: where its runs are tracked.

    Returns:
        The command.
    """
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
