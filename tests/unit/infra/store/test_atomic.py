import errno
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import env, faults
from infra.store import atomic
from infra.store.atomic import (
    atomic_write_bytes,
    create_exclusively,
    make_directories,
    publish_directory,
    remove_abandoned,
    temporary_sibling,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    faults._passes.clear()
    yield
    faults._passes.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The order of fsync and rename, each with the name that the object had then."""
    made: list[tuple[str, str]] = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        made.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        made.append(("rename", f"{Path(source).name} {Path(target).name}"))
        real_rename(source, target)

    def replace(source: Path, target: Path) -> None:
        made.append(("rename", Path(target).name))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    return made


def test_write_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "f"
    atomic_write_bytes(path, b"one")
    atomic_write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["f"]


def test_write_is_durable_before_it_is_visible(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    atomic_write_bytes(tmp_path / "f", b"x")
    kinds = [kind for kind, _ in calls]
    assert kinds == ["fsync", "rename", "fsync"]
    assert calls[0][1].startswith(atomic.TEMPORARY_PREFIX)
    assert calls[1:] == [("rename", "f"), ("fsync", tmp_path.name)]


def test_publish_is_durable_before_it_is_visible(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/a").write_bytes(b"a")
    (source / "b").write_bytes(b"b")
    (tmp_path / "store").mkdir()
    publish_directory(source, tmp_path / "store/final")
    at = calls.index(("rename", "source final"))
    assert sorted(calls[:at]) == [("fsync", name) for name in ("a", "b", "source", "sub")]
    assert calls.index(("fsync", "a")) < calls.index(("fsync", "sub"))
    assert calls.index(("fsync", "sub")) < calls.index(("fsync", "source"))
    assert calls[at + 1] == ("fsync", "store")


@pytest.mark.parametrize("point", ["atomic.before_rename", "atomic.before_link"])
def test_a_failure_leaves_the_old_content_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = tmp_path / "f"
    monkeypatch.setenv("RLHF_FAULTS", f"{point}=enospc")
    if point.endswith("rename"):
        path.write_bytes(b"old")
        write = atomic_write_bytes
    else:
        write = create_exclusively
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="injected") as caught:
        write(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == before


def test_a_failed_fsync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "disk")

    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk"):
        publish_directory(source, tmp_path / "final")
    with pytest.raises(OSError, match="disk"):
        atomic_write_bytes(tmp_path / "f", b"x")
    assert os.listdir(tmp_path) == ["source"]


def test_publish_does_not_replace(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    publish_directory(tmp_path / "first", tmp_path / "final")
    with pytest.raises(FileExistsError, match="already published"):
        publish_directory(tmp_path / "second", tmp_path / "final")
    assert (tmp_path / "final/who").read_text() == "first"
    assert (tmp_path / "second/who").read_text() == "second"


def test_publish_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "final").write_text("file")
    with pytest.raises(FileExistsError):
        publish_directory(tmp_path / "source", tmp_path / "final")


def _race(path: Path, number: int, start: Any, won: Any) -> None:
    start.wait(60)
    won[number] = create_exclusively(path, b"%d" % number * 1000)


def test_exactly_one_of_many_creators_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    num = 6
    barrier, won = context.Barrier(num), context.Array("b", num)
    path = tmp_path / "f"
    processes = [context.Process(target=_race, args=(path, i, barrier, won)) for i in range(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sum(won[:]) == 1
    winner = won[:].index(1)
    assert path.read_bytes() == b"%d" % winner * 1000
    assert os.listdir(tmp_path) == ["f"]


def test_make_directories_is_repeatable(tmp_path: Path) -> None:
    for _ in range(2):
        make_directories(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


def test_what_a_dead_writer_left_is_removed_at_once(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from infra.store.atomic import *\n"
    code += "temporary_sibling(Path(sys.argv[1], 'x')).mkdir()"
    environment = env.child_environment(PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    mine, elsewhere, old = (temporary_sibling(tmp_path / "x") for _ in range(3))
    elsewhere = elsewhere.with_name(".tmp-x-00000000.1.1-abc")
    old = old.with_name(".tmp-old-without-a-stamp")
    kept = tmp_path / "x"
    for path in (mine, elsewhere, old, kept):
        path.write_text("")
    yesterday = time.time() - 90_000
    os.utime(old, (yesterday, yesterday))
    assert len(os.listdir(tmp_path)) == 5
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([mine.name, elsewhere.name, "x"])


def test_a_lost_race_is_durable_before_it_is_believed(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    assert create_exclusively(tmp_path / "f", b"x")
    calls.clear()
    assert not create_exclusively(tmp_path / "f", b"y")
    assert calls[-1] == ("fsync", tmp_path.name)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    publish_directory(tmp_path / "a", tmp_path / "final")
    calls.clear()
    with pytest.raises(FileExistsError):
        publish_directory(tmp_path / "b", tmp_path / "final")
    assert calls[-1] == ("fsync", tmp_path.name)
