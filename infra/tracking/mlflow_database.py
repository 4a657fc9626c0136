"""The embedded MLflow database of a home: created and migrated in a temporary file, then renamed.

`python -m infra.tracking.mlflow_database DATABASE PROGRAM ARGUMENT...` prepares a database and
then executes the program; the MLflow server of `rlhf up` starts this way.
Promises: a kill leaves the old database or the complete new one; no row that another program
commits meanwhile is lost. If MLflow cannot migrate a database and every run, model and trace in it
is of this project, it is renamed and a new one with its registered models and aliases replaces it;
trackers see the change by `origin` and send their runs again. If it holds anything else, is
unreadable or was made by a newer MLflow, nothing is changed and the error says what to do.
Does not promise: to carry over notes, assessments and empty experiments that people added; the
renamed file keeps them.
"""

import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infra.errors import EXIT_USER_ERROR, PipelineError, ServiceError
from infra.host.records import file_lock
from infra.store.atomic import (
    TEMPORARY_PREFIX,
    fsync_directory,
    is_abandoned,
    temporary_sibling,
)

LOCK_DEADLINE_S = 120.0
BUSY_S = 60.0
_SIDE_FILES = ("", "-journal", "-wal", "-shm")
_UNREADABLE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_OF_THE_MACHINE = frozenset(
    {
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
    }
)
"""SQLite errors that come from the machine (disk full, locked) and not from the database."""
_OF_A_MIGRATION = (
    *(sqlite3.Error, LookupError, TypeError, ValueError, AttributeError),
    *(RuntimeError, AssertionError),
)
"""What a migration script of MLflow raises on rows that it does not expect."""
_UNFINISHED = "_alembic_tmp_"
"""Name prefix of the table copy that a migration makes."""
_ROWS_OF_OTHERS = {
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
"""Tables with rows of programs, each with a query for the rows that this project did not make."""
_DEPENDENT_TABLES = (
    *("alembic_", "experiment", "workspaces", "scheduler_leases", "registered_model"),
    *("params", "metrics", "latest_metrics", "tags", "inputs", "input_tags", "datasets"),
    *("logged_model_", "model_version_", "trace_", "spans", "span_metrics", "assessments", "sql_"),
)
"""Name prefixes of tables whose rows belong to rows of `_ROWS_OF_OTHERS`, or to MLflow itself."""
_REGISTRY = (
    *("registered_models", "registered_model_tags", "registered_model_aliases"),
    *("model_versions", "model_version_tags"),
)
"""Tables of the model registry, each after the tables that it refers to."""

_log = logging.getLogger(__name__)


def database_lock(database: Path) -> AbstractContextManager[None]:
    """Return the machine-wide lock for creating the database and adding runs."""
    return file_lock(database.with_name(f"{database.name}.lock"), LOCK_DEADLINE_S)


def ensure_whole(database: Path) -> None:
    """Create the database, migrate an older one, or replace one that cannot be migrated.

    The caller holds `database_lock`. `database` is absolute. Imports MLflow.

    Raises:
        ServiceError: a newer MLflow made it, or it cannot be migrated or read and may hold data of
            other programs.
    """
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they print tracebacks of SQL
    database.parent.mkdir(parents=True, exist_ok=True)
    for path in database.parent.glob(f"{TEMPORARY_PREFIX}{database.name}-*"):
        if is_abandoned(path):
            path.unlink(missing_ok=True)
    if database.exists() and not database.stat().st_size:
        database.unlink()  # the process was killed before SQLite's first write
    if not database.exists():
        for path in _files(database):  # SQLite would replay it into the new database
            path.rename(_aside(path))
        with _beside(database) as made:
            _make_tables(made)
            _publish(made, database)
    elif not _is_current(database):
        with _held(database), _beside(database) as made:
            aside = _migrate(database, made)
            _publish(made, database)
        if aside is not None:
            _log.warning(
                "tracking: MLflow could not migrate %s; it is kept as %s, and the runs that this "
                "home knows are sent to a new one",
                *(database, aside.name),
            )


def _migrate(database: Path, made: Path) -> Path | None:
    """Migrate into `made` and return None; else make it anew and return the old one's copy."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from mlflow.store.db.utils import _upgrade_db
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with closing(_connect(database)) as source:
            source.execute("VACUUM INTO ?", (str(made),))
        _upgrade_db(_engine(made))
        return None
    except (SQLAlchemyError, MlflowException, CommandError, *_OF_A_MIGRATION) as error:
        if _is_of_the_machine(error):
            raise
        reason = " ".join(str(error).partition("[SQL")[0].split())[:120]
        if others := _foreign_contents(database):
            raise _refusal(database, f"{others} (MLflow cannot migrate it: {reason})") from error
    for path in _files(made):
        path.unlink()
    _make_tables(made)
    _carry_registry(database, made)
    aside = _aside(database)
    try:
        aside.hardlink_to(database)
    except OSError:  # a file system without links
        shutil.copyfile(database, aside)
    return aside


def _make_tables(made: Path) -> None:
    from mlflow.store.db.utils import _initialize_tables

    _initialize_tables(_engine(made))


def _engine(made: Path):  # noqa: ANN202  SQLAlchemy's, which is imported with MLflow
    from sqlalchemy import URL, NullPool, create_engine

    return create_engine(URL.create("sqlite", database=str(made)), poolclass=NullPool)


def _carry_registry(database: Path, made: Path) -> None:
    """Copy registered models with versions and aliases: promotion gates and `rlhf gc` need them."""
    with closing(_connect(made)) as new:
        new.execute("ATTACH ? AS old", (str(database),))
        try:
            for table in _REGISTRY:
                there = {row[1] for row in new.execute(f'PRAGMA old.table_info("{table}")')}
                here = [row[1] for row in new.execute(f'PRAGMA main.table_info("{table}")')]
                columns = ", ".join(f'"{name}"' for name in here if name in there)
                if columns:
                    new.execute(
                        f'INSERT INTO main."{table}" ({columns}) '  # noqa: S608  its own names
                        f'SELECT {columns} FROM old."{table}"'
                    )
            new.commit()
        except sqlite3.DatabaseError as error:
            if _is_of_the_machine(error):
                raise
            said = f"holds registered models that cannot be carried over ({error})"
            raise _refusal(database, said) from error


def _publish(made: Path, database: Path) -> None:
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    if database.exists():
        shutil.copymode(database, made)
    made.replace(database)
    fsync_directory(database.parent)


@contextmanager
def _beside(database: Path) -> Iterator[Path]:
    """Yield a temporary database path; removes all its files at exit."""
    made = temporary_sibling(database)
    try:
        yield made
    finally:
        for path in _files(made):
            path.unlink()


@contextmanager
def _held(database: Path) -> Iterator[None]:
    """Block writers until the file is replaced; SQLite then refuses writes to the old one."""
    with closing(_connect(database)) as holder:
        # A leftover WAL would be applied to the new file. This fails while another has it open.
        holder.execute("PRAGMA journal_mode = DELETE")
        holder.execute("BEGIN IMMEDIATE")
        yield


def _is_current(database: Path) -> bool:
    """True if this MLflow's last migration is recorded; MLflow records it when it is done."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    scripts = ScriptDirectory.from_config(_get_alembic_config(""))
    with closing(_connect(database)) as connection:
        try:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.DatabaseError as error:
            if _code(error) in _UNREADABLE:
                raise _refusal(database, f"cannot be read ({error})") from error
            if _code(error) != sqlite3.SQLITE_ERROR:  # SQLITE_ERROR: no such table
                raise
            return False
    noted = {version for (version,) in rows}
    if unknown := noted - {each.revision for each in scripts.walk_revisions()}:
        said = f"was made by a newer MLflow (revision {min(unknown)}), which opens it"
        raise _refusal(database, said)
    return noted == {scripts.get_current_head()}


def _foreign_contents(database: Path) -> str:
    """Describe contents that are not this project's; empty if there are none."""
    found = []
    try:
        with closing(_connect(database)) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {name for (name,) in connection.execute(query).fetchall()}
            for table in sorted(tables):
                of = table.removeprefix(_UNFINISHED)
                is_lone = of not in tables
                if (of in tables and of != table) or (
                    of.startswith(_DEPENDENT_TABLES)
                    and of not in _ROWS_OF_OTHERS
                    and not (is_lone and of in _REGISTRY)
                ):
                    continue
                rows = f'SELECT * FROM "{table}"'  # noqa: S608  its own name
                if connection.execute(f"{rows} LIMIT 1").fetchone():
                    others = connection.execute(_ROWS_OF_OTHERS.get(table, rows)).fetchall()
                    found += [f"{len(others)} of {table}"] if others else []
    except sqlite3.DatabaseError as error:
        if _code(error) in {*_UNREADABLE, sqlite3.SQLITE_ERROR}:
            return f"cannot be read ({error})"
        raise
    return f"holds what other programs wrote ({', '.join(found)})" if found else ""


def _refusal(database: Path, said: str) -> ServiceError:
    return ServiceError(
        f"{database} {said}; restore a copy of it, or rename it: the next run makes a new one and "
        "sends what this home knows, without the aliases that people gave"
    )


def _is_of_the_machine(error: Exception) -> bool:
    cause = getattr(error, "orig", error)  # SQLAlchemy's errors carry SQLite's
    return isinstance(cause, OSError | MemoryError) or _code(cause) in _OF_THE_MACHINE


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _files(database: Path) -> list[Path]:
    paths = (database.with_name(database.name + suffix) for suffix in _SIDE_FILES)
    return [path for path in paths if path.exists()]


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.broken-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")


def _connect(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(database, timeout=BUSY_S)


def main(database: str, *program: str) -> None:
    """Prepare a database, then replace this process by the program that serves it."""
    path = Path(database).resolve()
    try:
        with database_lock(path):
            ensure_whole(path)
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USER_ERROR)
    os.execvp(program[0], program)  # noqa: S606  a command line of ours


if __name__ == "__main__":
    main(*sys.argv[1:])
