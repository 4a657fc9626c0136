"""A Prefect server of our own for one `rlhf run`, where no server is configured.

Prefect can start such a server itself, but only after its import, and with its log on our
terminal. Ours starts at once, loads while we load, and logs to a file.
Promises: history stays in `<home>/prefect` from run to run; the server ends with the run, and
one whose run was killed is ended by the next; nothing is sent to third parties.
"""

import contextlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra import env
from infra.errors import ServiceError
from infra.host.processes import (
    ProcessIdentity,
    ProcessRecord,
    is_alive,
    own_identity,
    pick_ports,
    start_detached,
    stop,
)
from infra.host.records import load_record, log_tail, save_record
from infra.waiting import wait_for

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0
RECORD_PREFIX = "prefect-embedded-"


class _Record(BaseModel):
    """A server and the run it belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    owner: ProcessIdentity
    server: ProcessRecord


class EmbeddedPrefect:
    """A server that was started and may not answer yet.

    Args:
        api_url: where it will answer.
        server: its process.
        record_path: removed when it has ended.
    """

    def __init__(self, api_url: str, server: ProcessRecord, record_path: Path) -> None:
        self.api_url = api_url
        self._server = server
        self._record_path = record_path

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            ServiceError: it ended instead.
            DeadlineError: it did not answer in time.
        """
        wait_for(self._answers, f"the Prefect server at {self.api_url}", START_DEADLINE_S)

    def close(self) -> None:
        """End it."""
        stop(self._server, STOP_DEADLINE_S)
        self._record_path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        if not is_alive(self._server):
            tail = log_tail(self._server.log_path)
            raise ServiceError(f"the Prefect server ended; log {self._server.log_path}{tail}")
        try:
            with urllib.request.urlopen(f"{self.api_url}/health", timeout=2.0) as answer:  # noqa: S310  our own loopback address
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def embedded_prefect(home: Path) -> Iterator[EmbeddedPrefect]:
    """Start a server, without waiting for it, and end it with the block.

    Args:
        home: its database is in `<home>/prefect`.

    Yields:
        EmbeddedPrefect: the server.
    """
    services = home / "services"
    _end_orphans(services)
    port = pick_ports(1)[0]
    api_url = f"http://127.0.0.1:{port}/api"
    prefect_home = home / "prefect"
    prefect_home.mkdir(parents=True, exist_ok=True)
    server = start_detached(
        server_command(port),
        home / "logs" / "prefect-embedded.log",
        env.child_environment(
            PREFECT_HOME=str(prefect_home),
            PREFECT_API_URL=api_url,
            PREFECT_UI_ENABLED="false",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            DO_NOT_TRACK="1",
        ),
    )
    record_path = services / f"{RECORD_PREFIX}{own_identity().pid}.json"
    save_record(record_path, _Record(owner=own_identity(), server=server))
    started = EmbeddedPrefect(api_url, server, record_path)
    try:
        yield started
    finally:
        started.close()


def check_answers(api_url: str) -> None:
    """Refuse a configured server that is not there, before anything is started.

    Args:
        api_url: as PREFECT_API_URL has it.

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


def server_command(port: int) -> list[str]:
    """The command line of a server: what `prefect server start` runs, without its own start-up."""
    return [
        *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--log-level", "error", "--lifespan", "on"),
    ]


def _end_orphans(services: Path) -> None:
    """End the servers of runs that were killed."""
    for path in services.glob(f"{RECORD_PREFIX}*.json"):
        record = load_record(path, _Record)
        if record is not None and not is_alive(record.owner):
            stop(record.server, STOP_DEADLINE_S)
            path.unlink(missing_ok=True)


def use_prefect(home: Path, api_url: str, *, quiet: bool) -> None:
    """Set what Prefect reads when it is imported; to be called before.

    Args:
        home: results are kept in `<home>/prefect`.
        api_url: the server to talk to.
        quiet: keep Prefect's lines off the terminal; they still reach the run page.
    """
    settings = {
        env.PREFECT_API_URL: api_url,
        env.PREFECT_HOME: env.PREFECT_HOME.get() or str(home / "prefect"),
        env.PREFECT_RESULTS_DEFAULT_SERIALIZER: "json",
        env.PREFECT_SERVER_ANALYTICS_ENABLED: "false",
        env.DO_NOT_TRACK: "1",
    }
    if quiet:
        settings[env.PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL] = "CRITICAL"
    for variable, value in settings.items():
        env.set_for_process(variable.name, value)
