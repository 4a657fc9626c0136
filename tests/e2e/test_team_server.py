"""What `compose.yaml` starts, without containers: its commands and settings, on a real Postgres.

Only addresses are others: all on loopback, on ports that are free.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rlhf.testing.s3_server import environment as s3_environment
from rlhf.testing.s3_server import s3_server
from tiny_pipeline import Home

from infra import env
from infra.host.ports import pick_ports
from infra.waiting import wait_for

pytestmark = pytest.mark.stacks

DOCKER = Path(__file__).resolve().parents[2] / "infra" / "docker"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))[
    "services"
]
PROGRAMS = {
    "python": [sys.executable],
    "prefect": [sys.executable, "-m", "prefect"],
    "mlflow": [sys.executable, "-m", "mlflow"],
    "rlhf": [sys.executable, "-m", "flows.commands.cli"],
}
GIVEN = {"POSTGRES_PASSWORD": "a-password", "PREFECT_API_AUTH_STRING": "team:a-word"}
START_DEADLINE_S = 600.0


@dataclass
class Team:
    """The servers, and how the services of the file are started against them."""

    root: Path
    ports: Mapping[str, int]
    given: Mapping[str, str]
    s3: str

    def say(self, text: str) -> str:
        """A value of the file, its variables and addresses replaced."""
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: self.given[found[1]], text)
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
        text = text.replace("http://s3:9000", self.s3).replace("0.0.0.0", "127.0.0.1")
        for name, port in (("postgres", 5432), ("prefect", 4200), ("mlflow", 5000)):
            text = re.sub(
                rf"\b(?:127\.0\.0\.1|(?<=[@/]){name}):{port}\b",
                f"127.0.0.1:{self.ports[name]}",
                text,
            )
            text = str(self.ports[name]) if text == str(port) else text
        return text

    def command(self, service: str, words: list[str] | None = None) -> list[str]:
        """Of a service, or another one in it."""
        program, *arguments = words or SERVICES[service]["command"]
        return [*PROGRAMS[program], *map(self.say, arguments)]

    def environment(self, service: str) -> dict[str, str]:
        """Of a service, as image and file set it."""
        foreign = dict.fromkeys(
            name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "AWS_"))
        )
        asked = SERVICES[service].get("environment", {})
        values = {name: self.say(value) for name, value in asked.items()}
        home = {"PREFECT_HOME": str(self.root / service), "RLHF_HOME": str(self.root / "rlhf")}
        return env.child_environment(**{**foreign, **home, "DO_NOT_TRACK": "1", **values})

    def once(self, service: str, words: list[str] | None = None) -> str:
        """What a command prints that has to end well."""
        ended = subprocess.run(
            self.command(service, words),
            env=self.environment(service),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def is_healthy(self, service: str) -> bool:
        """Whether its check says so."""
        _, *words = SERVICES[service]["healthcheck"]["test"]
        command = self.command(service, words)
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    @contextmanager
    def running(self, service: str) -> Iterator[None]:
        """A service, once its check says that it works."""
        log = self.root / f"{service}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command(service),
                env=self.environment(service),
                cwd=self.root,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            wait_for(
                lambda: self.is_healthy(service) or process.poll() is not None,
                service,
                START_DEADLINE_S,
                poll_s=2.0,
            )
            assert process.poll() is None, log.read_text()
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def url(self, service: str) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.ports[service]}"


@contextmanager
def postgres(port: int, password: str) -> Iterator[None]:
    """A new server with the databases of the file; skips the test where there is no Postgres."""
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")), shutil.which("initdb")]
    if found[0] is None:
        pytest.skip("needs PostgreSQL's own programs: apt-get install postgresql")
    programs = Path(found[0]).parent
    # It refuses to run as root, and its user may not look into the directories of tests.
    user = "postgres" if os.getuid() == 0 else None
    place = Path(tempfile.mkdtemp(prefix="postgres-"))
    data, word = place / "data", place / "password"
    word.write_text(password)
    if user:
        shutil.chown(place, user)
        shutil.chown(word, user)
    subprocess.run(
        [programs / "initdb", "--pgdata", data, "--username", "rlhf", "--pwfile", word, "--no-sync"]
        + ["--auth", "scram-sha-256", "--encoding", "UTF8"],
        user=user,
        cwd=place,
        check=True,
        capture_output=True,
        timeout=START_DEADLINE_S,
    )
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-k", place]
        + ["-c", "listen_addresses=127.0.0.1"],
        user=user,
        cwd=place,
    )
    try:
        url = f"postgresql://rlhf:{password}@127.0.0.1:{port}/postgres"
        ready = [programs / "pg_isready", "--dbname", url]
        wait_for(
            lambda: subprocess.run(ready, capture_output=True).returncode == 0,
            "Postgres",
            START_DEADLINE_S,
        )
        subprocess.run(
            [programs / "psql", url, "--file", str(DOCKER / "databases.sql")],
            check=True,
            capture_output=True,
            timeout=START_DEADLINE_S,
        )
        yield
    finally:
        server.send_signal(signal.SIGQUIT)
        server.wait(timeout=30)
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    pytest.importorskip("psycopg2", reason="needs the package psycopg2-binary")
    ports = dict[str, int](zip(("postgres", "prefect", "mlflow"), pick_ports(3), strict=True))
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server())
        stack.enter_context(postgres(ports["postgres"], GIVEN["POSTGRES_PASSWORD"]))
        given = {**GIVEN, **s3_environment(s3)}
        team = Team(tmp_path_factory.mktemp("team"), ports, given, s3)
        for _ in range(2):
            team.once("bucket")
        stack.enter_context(team.running("prefect"))
        stack.enter_context(team.running("mlflow"))
        yield team


def answer(url: str, **headers: str) -> int:
    """The status of a GET."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as it:
            return it.status
    except urllib.error.HTTPError as error:
        return error.code


def rows(team: Team, database: str, query: str) -> list[tuple[Any, ...]]:
    """Of Postgres itself."""
    import psycopg2

    where = {"host": "127.0.0.1", "port": team.ports["postgres"], "dbname": database}
    connection = psycopg2.connect(user="rlhf", password=GIVEN["POSTGRES_PASSWORD"], **where)
    with connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


def test_prefect_wants_a_password_and_mlflow_its_own_name(team: Team) -> None:
    assert answer(f"{team.url('prefect')}/api/admin/version") == 401
    mlflow = f"{team.url('mlflow')}/api/2.0/mlflow/experiments/search?max_results=1"
    assert answer(mlflow, Host="mlflow:5000") == 200
    assert answer(mlflow, Host="elsewhere.example") == 403


def test_the_automations_are_there_once(team: Team) -> None:
    assert team.once("automations").count("created") == 5
    assert team.once("automations").count("unchanged") == 5
    assert rows(team, "prefect", "select count(*) from automation") == [(5,)]


def test_a_pipeline_is_tracked_in_the_databases_and_the_bucket(team: Team, tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    home.environment |= {
        "PREFECT_API_URL": f"{team.url('prefect')}/api",
        "PREFECT_API_AUTH_STRING": GIVEN["PREFECT_API_AUTH_STRING"],
        "MLFLOW_TRACKING_URI": team.url("mlflow"),
    }
    report = home.run("rl.num_rounds=0")
    assert rows(team, "prefect", "select state_type::text from flow_run") == [("COMPLETED",)]
    [[alias]] = rows(team, "mlflow", "select alias from registered_model_aliases")
    assert alias == "champion"
    import boto3

    access = {"aws_access_key_id": "test", "aws_secret_access_key": "test-secret"}
    client = boto3.client("s3", endpoint_url=team.s3, region_name="us-east-1", **access)
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="mlflow")["Contents"]]
    assert any(key.endswith("model.safetensors") for key in keys), json.dumps(keys)
    assert any("report" in key for key in keys), json.dumps(keys)
    assert report["stages"]
