"""The embedded MLflow database of a home: made and migrated beside its place, renamed when whole.

`python -m infra.tracking.mlflow_database DATABASE PROGRAM ARGUMENT...` prepares a database and
then becomes the program, which is how the MLflow server of `rlhf up` starts.
Promises: whenever a process is killed, the database is as it was or it is whole, and the next
process goes on from there. A database that MLflow cannot migrate is renamed, with one line that
says so, and an empty one takes its place; a tracker sees by `origin` that it is another one, and
is told everything again. That happens only if every run, model and trace in it is of this project:
otherwise, and if it cannot be read, nothing is changed and the error says what to do.
Does not promise: that a process which has the database open during a migration writes to the new
one.
"""

import logging
import os
import sqlite3
import sys
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from pathlib import Path

from infra.errors import ServiceError
from infra.host.records import file_lock
from infra.store.atomic import fsync_directory, remove_abandoned, temporary_sibling

LOCK_DEADLINE_S = 120.0
BUSY_S = 60.0
"""How long SQLite waits for another writer, in seconds."""
_SIDE_FILES = ("", "-journal", "-wal", "-shm")
_UNREADABLE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_OF_THE_MACHINE = frozenset(
    {
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
    }
)
"""What SQLite answers on a full disk and the like, which says nothing of the database."""
_OURS = {
    "runs": "SELECT run_uuid FROM runs EXCEPT SELECT run_uuid FROM tags WHERE key = 'rlhf.key'",
    "logged_models": (
        "SELECT model_id FROM logged_models EXCEPT "
        "SELECT model_id FROM logged_model_tags WHERE tag_key = 'rlhf.digest'"
    ),
    "model_versions": (
        "SELECT name, version FROM model_versions EXCEPT "
        "SELECT name, version FROM model_version_tags WHERE key = 'rlhf.digest'"
    ),
    "trace_info": (
        "SELECT request_id FROM trace_info EXCEPT "
        "SELECT request_id FROM trace_tags WHERE key = 'rlhf.step'"
    ),
}
"""Tables whose rows a program makes, each with a query for the rows that this project did not."""
_PARTS = (
    *("alembic_", "experiment", "workspaces", "scheduler_leases", "registered_model"),
    *("params", "metrics", "latest_metrics", "tags", "inputs", "input_tags", "datasets"),
    *("logged_model_", "model_version_", "trace_", "spans", "span_metrics", "assessments", "sql_"),
)
"""Beginnings of names of tables whose rows belong to a row of those, or to MLflow itself."""

_log = logging.getLogger(__name__)


def database_lock(database: Path) -> AbstractContextManager[None]:
    """What one process of this machine at a time holds: to make the database, and to add runs."""
    return file_lock(database.with_name(f"{database.name}.lock"), LOCK_DEADLINE_S)


def ensure_whole(database: Path) -> None:
    """Make the database if there is none, migrate it if it is older, replace it if it is broken.

    Called under `database_lock`. Imports MLflow.

    Args:
        database: the SQLite file; absolute.

    Raises:
        ServiceError: it cannot be migrated or read, and holds, or may hold, what other programs
            wrote.
        OSError: the disk refuses.
    """
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they print tracebacks of SQL
    database.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(database.parent)
    if database.exists() and not database.stat().st_size:
        database.unlink()  # SQLite had opened it and was killed before its first write
    if not database.exists():
        _replace(database, copied=False)
    elif not _is_current(database):
        try:
            _replace(database, copied=True)
        except Exception as error:  # a migration raises whatever it stumbles over
            if _is_of_the_machine(error):
                raise
            _make_anew(database, error)


def _make_anew(database: Path, error: Exception) -> None:
    """Set a database aside that could not be migrated, and put an empty one in its place."""
    reason = " ".join(str(error).partition("[SQL")[0].split())[:120]
    foreign = _foreign(database)
    if foreign:
        raise ServiceError(
            f"{database} {foreign}; restore a copy of it, or rename it and the next run makes a "
            f"new one from the ledger (MLflow cannot migrate it: {reason})"
        ) from error
    aside = database.with_name(f"{database.name}.broken-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    _replace(database, copied=False, aside=aside)
    _log.warning(
        "tracking: %s could not be migrated (%s); it is kept as %s, and every run is told again "
        "to a new one",
        *(database, reason, aside.name),
    )


def _replace(database: Path, *, copied: bool, aside: Path | None = None) -> None:
    """Bring a database to MLflow's tables under a temporary name, then give it its own.

    Args:
        database: where it lies in the end.
        copied: begin with what is there, else with nothing.
        aside: what there is gets this name.
    """
    from mlflow.store.db.utils import _initialize_tables, _upgrade_db
    from sqlalchemy import NullPool, create_engine

    made = temporary_sibling(database)
    engine = create_engine(f"sqlite:///{made}", poolclass=NullPool)
    try:
        if copied:
            with closing(_connect(database)) as source:
                source.execute("VACUUM INTO ?", (str(made),))
            _upgrade_db(engine)
        else:
            _initialize_tables(engine)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        if aside is not None:
            for path in _files(database):  # a journal left behind would be played into the new one
                path.rename(aside.with_name(path.name.replace(database.name, aside.name, 1)))
        made.rename(database)
        fsync_directory(database.parent)
    finally:
        for path in _files(made):
            path.unlink()


def _is_current(database: Path) -> bool:
    """Whether the last migration of this MLflow is noted; it is noted when it is done."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    with closing(_connect(database)) as connection:
        try:
            found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.DatabaseError as error:
            if _is_absent(error) or error.sqlite_errorcode in _UNREADABLE:
                return False
            raise
    return found == [(_get_latest_schema_revision(),)]


def _foreign(database: Path) -> str:
    """What of a database is not this project's, in words; empty if there is nothing."""
    found = []
    try:
        with closing(_connect(database)) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = [name for (name,) in connection.execute(query).fetchall()]
            for table in tables:
                # A migration that was killed leaves a copy, or the copy alone.
                if table.removeprefix("_alembic_tmp_") in {*tables} - {table}:
                    continue
                if table not in _OURS and table.startswith(_PARTS):
                    continue
                others = _OURS.get(table, f'SELECT * FROM "{table}"')  # noqa: S608  its own name
                if connection.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone():  # noqa: S608
                    num_rows = len(connection.execute(others).fetchall())
                    found += [f"{num_rows} of {table}"] if num_rows else []
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in _UNREADABLE or _is_absent(error):
            return f"cannot be read ({error})"
        raise
    return f"holds what other programs wrote ({', '.join(found)})" if found else ""


def _is_of_the_machine(error: Exception) -> bool:
    cause = getattr(error, "orig", error)  # SQLAlchemy's errors carry SQLite's
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return isinstance(cause, OSError | MemoryError) or code in _OF_THE_MACHINE


def _files(database: Path) -> list[Path]:
    """What there is of a database: itself, and what SQLite keeps beside it."""
    paths = (database.with_name(database.name + suffix) for suffix in _SIDE_FILES)
    return [path for path in paths if path.exists()]


def _connect(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(database, timeout=BUSY_S)


def _is_absent(error: sqlite3.DatabaseError) -> bool:
    """Whether a query named a table or column that is not there."""
    return error.sqlite_errorcode == sqlite3.SQLITE_ERROR


def main(database: str, *program: str) -> None:
    """Prepare a database, then become the program that serves it."""
    path = Path(database).resolve()
    with database_lock(path):
        ensure_whole(path)
    os.execvp(program[0], program)  # noqa: S606  a command line of ours


if __name__ == "__main__":
    main(*sys.argv[1:])
