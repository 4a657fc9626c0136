"""A Prefect server of our own for the `rlhf run`s of a home, where no server is configured.

Prefect can start such a server itself, but only after its import, and with its log on our
terminal. Ours starts at once, loads while we load, and logs to a file.
Promises: history stays in `<home>/prefect` from run to run; runs at one time share one server; it
ends with the last of them, also if they were killed; a run that was killed under an earlier
server is *Crashed* in the history; nothing is sent to third parties.
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
from infra.host.ports import pick_ports
from infra.host.servers import ServerCommand
from infra.services.commands import HEARTBEAT_S
from infra.services.stack import running_prefect_url

NAME = "prefect-embedded"


@dataclass(frozen=True)
class PrefectServer:
    """The server of a run.

    Attributes:
        api_url: where it answers.
        wait: returns when it answers, or raises ServiceError or DeadlineError.
        lasting: whether it is there after the run.
        history_is_dead: whether no run in its database can be alive.
    """

    api_url: str
    wait: Callable[[], None]
    lasting: bool
    history_is_dead: bool


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """The configured server, else the one of `rlhf up`, else one for the runs of this home.

    Args:
        home: where the servers are recorded.

    Yields:
        PrefectServer: the server; an embedded one may not answer yet.
    """
    api_url = env.PREFECT_API_URL.get() or running_prefect_url(home)
    if api_url:
        check_answers(api_url)
        yield PrefectServer(api_url, wait=lambda: None, lasting=True, history_is_dead=False)
        return
    with embedded_prefect(home) as embedded:
        yield embedded


@contextlib.contextmanager
def embedded_prefect(home: Path) -> Iterator[PrefectServer]:
    """Start a server or share the one that runs, without waiting for it, and leave it at the end.

    Args:
        home: its database is in `<home>/prefect`.

    Yields:
        PrefectServer: the server; it may not answer yet.
    """
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
    """Refuse a configured server that is not there, before anything is started.

    Raises:
        ServiceError: nothing answers.
    """
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=10.0):  # noqa: S310  the user's own address
            return
    except urllib.error.HTTPError:
        return  # it answers; what it thinks of our credentials Prefect will say
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"the Prefect server at {api_url} does not answer ({error}); start it, or unset "
            "PREFECT_API_URL"
        ) from None


def server_command(home: Path) -> ServerCommand:
    """Command of the Prefect server, without the start-up of `prefect server start`.

    Args:
        home: its database is in `<home>/prefect`.

    Returns:
        The command, on a port that is free now.
    """
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
    """Set what Prefect reads when it is imported; to be called before.

    Args:
        home: results are kept in `<home>/prefect`.
        quiet: keep Prefect's lines off the terminal; they still reach the run page.
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
