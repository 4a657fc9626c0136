"""An embedded Prefect server for the runs of a home, used if no server is configured.

Prefect can start such a server itself, but only after its import, and with its log on the terminal.
The embedded one starts early, loads while this process loads, and logs to a file.
Promises: the history in `<home>/prefect` persists. Concurrent runs share one server, which ends
with the last of them, even if they were killed. A run that was killed under an earlier server
becomes *Crashed* in the history. Telemetry is off.
"""

import contextlib
import functools
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra import env
from infra.errors import ServiceError
from infra.host import servers
from infra.host.ports import NO_ANSWER, pick_ports
from infra.host.servers import ServerCommand
from infra.services.stack import HEARTBEAT_S, running_url

NAME = "prefect-embedded"


@dataclass(frozen=True)
class PrefectServer:
    """The Prefect server of a run.

    Attributes:
        wait: returns when the server answers; raises ServiceError or DeadlineError.
        lasting: True if it outlives the run.
        history_is_dead: True if no run in its database can be alive.
    """

    api_url: str
    wait: Callable[[], None]
    lasting: bool
    history_is_dead: bool


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """Yield the configured server, else that of `rlhf up`, else an embedded one."""
    api_url = env.PREFECT_API_URL.get() or running_url(home, "prefect")
    if api_url:
        check_answers(api_url)
        yield PrefectServer(api_url, wait=lambda: None, lasting=True, history_is_dead=False)
        return
    with embedded_prefect(home) as embedded:
        yield embedded


@contextlib.contextmanager
def embedded_prefect(home: Path) -> Iterator[PrefectServer]:
    """Start or join an embedded server, which may not answer yet, and leave it at the end."""
    try:
        with servers.lock(home, NAME):
            record = servers.load(home, NAME)
            alone = record is None or not record.living_users
            if record is not None and not record.is_running:
                servers.stop(home, record)
                record = None
            started = record is None
            if record is None:
                record = servers.start(home, server_command(home), persistent=False)
            record = servers.join(home, record, persistent=False)
        yield PrefectServer(
            record.url,
            wait=functools.partial(servers.wait_until_ready, record),
            lasting=False,
            history_is_dead=started and alone,
        )
    finally:
        servers.leave(home, NAME)


def check_answers(api_url: str) -> None:
    """Raise `ServiceError` unless a server answers, before anything else is started."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=10.0):  # noqa: S310  the user's own address
            return
    except urllib.error.HTTPError:
        return  # it answers; Prefect reports wrong credentials itself
    except (*NO_ANSWER, ValueError) as error:
        raise ServiceError(
            f"the Prefect server at {api_url} does not answer ({error}); start it, or unset "
            "PREFECT_API_URL"
        ) from None


def server_command(home: Path) -> ServerCommand:
    """Return the server's command on a free port, without the cost of `prefect server start`."""
    port = pick_ports(1)[0]
    url = f"http://127.0.0.1:{port}/api"
    prefect_home = home / "prefect"
    prefect_home.mkdir(parents=True, exist_ok=True)
    return ServerCommand(
        name=NAME,
        argv=(
            *(sys.executable, "-m", "infra.host.guard", str(home), NAME),
            *("uvicorn", "--factory", "prefect.server.api.server:create_app"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--log-level", "error", "--lifespan", "on"),
        ),
        environment=env.child_environment(
            PREFECT_HOME=str(prefect_home),
            PREFECT_API_URL=url,
            PREFECT_UI_ENABLED="false",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def use_prefect(home: Path, api_url: str, *, quiet: bool) -> None:
    """Set the variables that Prefect reads at import; call it before Prefect is imported.

    `quiet` keeps Prefect's log off the terminal; it still reaches the run page.
    """
    settings = {
        env.PREFECT_API_URL: api_url,
        env.PREFECT_HOME: env.PREFECT_HOME.get() or str(home / "prefect"),
        env.PREFECT_RESULTS_DEFAULT_SERIALIZER: "json",
        env.PREFECT_SERVER_ANALYTICS_ENABLED: "false",
        env.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: str(HEARTBEAT_S),
        env.DO_NOT_TRACK: "1",
    }
    if quiet:
        settings[env.PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL] = "CRITICAL"
    for variable, value in settings.items():
        env.set_for_process(variable.name, value)
