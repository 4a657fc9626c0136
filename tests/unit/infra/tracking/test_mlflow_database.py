"""The embedded MLflow database: whole or not there, and made anew if MLflow cannot migrate it."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow_ends
import pytest
from mlflow.store.db.utils import create_sqlalchemy_engine_with_retry
from tracked_world import PARENT, told

from infra.errors import ServiceError
from infra.store.storage import LocalStorage
from infra.tracking import mlflow_database
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import Ledger
from infra.tracking.mlflow_database import ensure_whole
from infra.tracking.mlflow_tracker import MlflowTracker
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import TrackerSettings

NUM_STATEMENTS = 1600
"""Some fewer than MLflow 3.17 and 3.18 need for a database and a first run."""
OLDER = "UPDATE alembic_version SET version_num = '5d2d30f0abce'"
"""As a start that was killed left it: the next migration adds a column that is there."""


def ends(home: Path, *killed_at: int) -> list[int]:
    """Exit statuses of processes that open the home's MLflow, each killed at a statement."""
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, mlflow_ends.__file__, str(home), *map(str, killed_at)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def run_names(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM runs ORDER BY name")]


def files(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("*mlflow.db*") if path.suffix != ".lock")


def spoil(database: Path, *statements: str) -> bytes:
    with closing(sqlite3.connect(database)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return database.read_bytes()


TELL = """
import sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from tracked_world import PARENT, STAGE, World, finished, told
from infra.tracking.mlflow_tracker import MlflowTracker
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import TrackedRun, TrackerSettings
home = Path(sys.argv[1])
world, tracker = World(home), MlflowTracker(TrackerSettings(home, f"sqlite:///{home}/mlflow.db"))
world.train(1, 2)
world.commit()
shipper = Shipper(world.ledger(tracker), tracker, world.history, ship_every_s=0.01)
told(shipper, PARENT, finished(STAGE), finished(PARENT))
client = MlflowClient(tracking_uri=tracker.uri, registry_uri=tracker.uri)
client.create_registered_model("policy")
run_id = tracker.open_run(TrackedRun(STAGE.key, "sft"))
client.create_model_version("policy", "/nowhere", run_id, tags={"rlhf.digest": "d" * 64})
client.set_registered_model_alias("policy", "by-hand", "1")
"""


@pytest.fixture(scope="module")
def told_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose MLflow knows a finished stage and its run.

    They were told by a process of its own: MLflow keeps the connections of a process to a
    database, whatever has its name later.
    """
    home = tmp_path_factory.mktemp("home")
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", TELL, str(home)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": places},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert run_names(home / "mlflow.db") == ["run", "sft"]
    return home


@pytest.fixture
def told_home(told_once: Path, tmp_path: Path) -> Iterator[Path]:
    """The same home, in the same place, for each test."""
    shutil.copytree(told_once, tmp_path / "kept")
    yield told_once
    shutil.rmtree(told_once)
    (tmp_path / "kept").rename(told_once)


def tracker_of(home: Path) -> MlflowTracker:
    return MlflowTracker(TrackerSettings(home, f"sqlite:///{home}/mlflow.db"))


def tell_again(home: Path) -> None:
    """What a later run tells that reuses the stage."""
    tracker = tracker_of(home)
    ledger = Ledger(home, tracker.address, "store")
    shipper = Shipper(ledger, tracker, StageHistory(LocalStorage(home / "store")))
    told(shipper, PARENT.model_copy(update={"key": "c" * 64, "state": "FINISHED"}))


@pytest.mark.parametrize(
    "killed_at",
    [
        (NUM_STATEMENTS // 3, NUM_STATEMENTS // 2),
        pytest.param(
            tuple(random.Random(46).sample(range(1, NUM_STATEMENTS), 10)), marks=pytest.mark.slow
        ),
    ],
    ids=["two", "ten"],
)
def test_fault_row_29_killed_creation_is_finished_by_the_next(
    tmp_path: Path, killed_at: tuple[int, ...]
) -> None:
    found = ends(tmp_path, *killed_at, 0)
    assert found == [-signal.SIGKILL] * len(killed_at) + [0]
    assert files(tmp_path) == ["mlflow.db"]
    assert run_names(tmp_path / "mlflow.db") == ["run"]


@pytest.mark.slow
def test_fault_row_29_killed_migration_keeps_the_old_database(tmp_path: Path) -> None:
    assert ends(tmp_path, 0) == [0]
    engine = create_sqlalchemy_engine_with_retry(f"sqlite:///{tmp_path}/mlflow.db")
    engine.dispose()
    # The last migration's own inverse: an older database that MLflow knows how to migrate.
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config

    config = _get_alembic_config(f"sqlite:///{tmp_path}/mlflow.db")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "-1")
    engine.dispose()
    before = (tmp_path / "mlflow.db").read_bytes()
    assert ends(tmp_path, 4) == [-signal.SIGKILL]
    assert (tmp_path / "mlflow.db").read_bytes() == before
    assert ends(tmp_path, 0) == [0]
    assert files(tmp_path) == ["mlflow.db"]
    assert run_names(tmp_path / "mlflow.db") == ["run"]


def test_fault_row_29_database_with_foreign_runs_is_left_alone(
    told_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = told_home / "mlflow.db"
    before = spoil(
        database,
        OLDER,
        "DELETE FROM tags WHERE rowid = (SELECT min(rowid) FROM tags WHERE key = 'rlhf.key')",
    )
    tell_again(told_home)
    assert database.read_bytes() == before
    assert files(told_home) == ["mlflow.db"]
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("infra.tracking")]
    assert "holds what other programs wrote (1 of runs)" in line
    assert "rename it" in line


def test_fault_row_29_unmigratable_database_is_rebuilt_in_full(
    told_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = spoil(told_home / "mlflow.db", OLDER)
    (told_home / "mlflow.db").chmod(0o600)
    # A gate and a collection that ask before anything is told again know every alias.
    bearer = tracker_of(told_home).incumbent("policy", "by-hand")
    assert bearer is not None
    assert bearer.artifact.digest == "d" * 64
    assert tracker_of(told_home).aliased() == {"d" * 64: "policy@by-hand"}
    tell_again(told_home)
    assert (told_home / "mlflow.db").stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(told_home / "mlflow.db")) as connection:
        states = connection.execute("SELECT name, status FROM runs ORDER BY name").fetchall()
        losses = connection.execute("SELECT step, value FROM metrics WHERE key = 'train/loss'")
        assert states == [("run", "FINISHED"), ("run", "FINISHED"), ("sft", "FINISHED")]
        assert sorted(losses.fetchall()) == [(1, 1.0), (2, 0.5)]
    (aside,) = told_home.glob("mlflow.db.broken-*")
    assert aside.read_bytes() == broken
    assert files(told_home) == ["mlflow.db", aside.name]
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("infra.tracking")]
    assert "could not migrate" in line
    assert aside.name in line
    assert "\n" not in line


@pytest.mark.parametrize("data", [b"not a database" * 100, b"SQLite format 3\0" + b"\1" * 5000])
def test_one_that_cannot_be_read_is_refused_and_left(tmp_path: Path, data: bytes) -> None:
    database = tmp_path / "mlflow.db"
    database.write_bytes(data)
    with pytest.raises(Exception, match=r"cannot be read .* rename it"):
        ensure_whole(database)
    assert database.read_bytes() == data
    assert files(tmp_path) == ["mlflow.db"]


def test_an_empty_file_is_a_database_that_was_never_written(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    database.touch()
    ensure_whole(database)
    assert run_names(database) == []
    assert files(tmp_path) == ["mlflow.db"]


def test_a_full_disk_is_no_reason_to_set_one_aside(small_disk: Path, tmp_path: Path) -> None:
    ensure_whole(tmp_path / "mlflow.db")
    spoil(tmp_path / "mlflow.db", OLDER)
    database = small_disk / "mlflow.db"
    database.write_bytes((tmp_path / "mlflow.db").read_bytes())
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * 400_000)
    before = database.read_bytes()
    with pytest.raises(Exception, match="full"):
        ensure_whole(database)
    assert database.read_bytes() == before
    filler.unlink()


def test_one_of_a_newer_mlflow_is_refused_and_left(tmp_path: Path) -> None:
    ensure_whole(tmp_path / "mlflow.db")
    before = spoil(tmp_path / "mlflow.db", "UPDATE alembic_version SET version_num = 'ffff'")
    with pytest.raises(ServiceError, match=r"made by a newer MLflow \(revision ffff\)"):
        ensure_whole(tmp_path / "mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == before
    assert files(tmp_path) == ["mlflow.db"]


def test_leftover_table_of_a_killed_migration_is_known_by_name(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    ensure_whole(database)
    lone = "ALTER TABLE latest_metrics RENAME TO _alembic_tmp_latest_metrics"
    row = "INSERT INTO _alembic_tmp_latest_metrics VALUES ('a', 1, 0, 0, 0, 'r')"
    spoil(database, OLDER, lone, row)
    ensure_whole(database)
    assert run_names(database) == []


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program in the middle of a transaction, some of which is on the disk already."""
    ensure_whole(tmp_path / "mlflow.db")
    spoil(tmp_path / "mlflow.db", OLDER)
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA cache_size = 1'); c.execute('BEGIN');"
        "c.execute('CREATE TABLE half AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 "
        "FROM n LIMIT 50000) SELECT i FROM n'); print('there', flush=True); input();"
        "c.execute('COMMIT')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "mlflow.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert (tmp_path / "mlflow.db-journal").stat().st_size
        yield process
        process.kill()


def is_sound(database: Path) -> bool:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_writer_is_waited_for_and_nothing_of_its_is_lost(
    tmp_path: Path, writer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "mlflow.db"
    monkeypatch.setattr(mlflow_database, "BUSY_S", 0.1)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ensure_whole(database)
    assert files(tmp_path) == ["mlflow.db", "mlflow.db-journal"]
    writer.communicate("\n", timeout=60)
    with pytest.raises(ServiceError, match="other programs wrote \\(50000 of half\\)"):
        ensure_whole(database)
    assert is_sound(database)


def test_what_a_killed_writer_left_is_not_played_into_a_new_one(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait()
    database = tmp_path / "mlflow.db"
    database.rename(tmp_path / "renamed.db")  # by hand, and the journal was forgotten
    ensure_whole(database)
    assert is_sound(database)
    assert not (tmp_path / "mlflow.db-journal").exists()
    (kept,) = tmp_path.glob("mlflow.db-journal.broken-*")
    assert kept.stat().st_size


def test_what_a_killed_writer_left_is_undone_before_a_migration(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait()
    ensure_whole(tmp_path / "mlflow.db")
    assert is_sound(tmp_path / "mlflow.db")
    (kept,) = tmp_path.glob("mlflow.db.broken-*")
    assert is_sound(kept)


def test_a_log_of_writes_that_others_have_open_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "mlflow.db"
    ensure_whole(database)
    monkeypatch.setattr(mlflow_database, "BUSY_S", 0.1)
    with closing(sqlite3.connect(database)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute(OLDER)
        other.commit()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            ensure_whole(database)
    ensure_whole(database)
    assert is_sound(database)


def test_files_of_others_beside_it_are_left(tmp_path: Path) -> None:
    for name in (".tmp-precious", ".tmp-mlflow.db-of-somebody"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / ".tmp-precious", (0, 0))
    ensure_whole(tmp_path / "mlflow.db")
    assert {".tmp-precious", ".tmp-mlflow.db-of-somebody"} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.slow
def test_a_server_becomes_the_program_once_the_database_is_there(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    arguments = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "a b", "c"]
    done = subprocess.run(
        [sys.executable, "-m", "infra.tracking.mlflow_database", str(database), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "['a b', 'c']\n", done.stderr
    assert run_names(database) == []
    database.write_bytes(b"not a database" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "infra.tracking.mlflow_database", str(database), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1
