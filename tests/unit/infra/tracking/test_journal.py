import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import env, faults, waiting
from infra.errors import DeadlineError, JournalError
from infra.tracking.journal import Journal, JournalRecord, read_records

ROOT = Path(__file__).resolve().parents[4]
NAMES = st.text(min_size=1, max_size=8)
ENTRIES = st.lists(
    st.one_of(
        st.tuples(
            st.just("metrics"),
            st.integers(0, 6),
            st.dictionaries(NAMES, st.floats(), min_size=1, max_size=3),
        ),
        st.tuples(st.just("progress"), st.integers(0, 9), st.text()),
        st.tuples(st.just("log"), st.just(0), st.text()),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    faults._passes.clear()
    yield
    faults._passes.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work/journal.jsonl"


def write(journal: Journal, entries: list[Any]) -> None:
    for kind, number, content in entries:
        if kind == "metrics":
            journal.metrics(number, content)
        elif kind == "progress":
            journal.progress(number, 10, content)
        else:
            journal.log(content)


def same(a: list[JournalRecord], b: list[JournalRecord]) -> bool:
    """Equal records; unlike `==`, NaN equals NaN."""
    return [repr(r) for r in a] == [repr(r) for r in b]


def test_lines_are_plain_json(path: Path) -> None:
    before_ms = time.time() * 1000 - 1
    with Journal(path) as journal:
        assert journal.metrics(1, {"train/loss": 0.5})
        journal.progress(1, 10, "step 1")
        journal.log("hello\nworld")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    times = [line.pop("time_ms") for line in lines]
    assert lines == [
        {"kind": "metrics", "step": 1, "values": {"train/loss": 0.5}},
        {"kind": "progress", "done": 1, "total": 10, "message": "step 1"},
        {"kind": "log", "message": "hello\nworld"},
    ]
    assert before_ms < times[0] <= times[1] <= times[2] <= time.time() * 1000


def test_a_step_is_recorded_once_also_after_reopening(path: Path) -> None:
    with Journal(path) as journal:
        assert journal.metrics(3, {"a": 1.0})
        assert journal.metrics(2, {"a": 1.0})
        assert not journal.metrics(3, {"a": 2.0})
    size_bytes = path.stat().st_size
    with Journal(path) as journal:
        assert not journal.metrics(2, {"a": 5.0})
        assert path.stat().st_size == size_bytes
        assert journal.metrics(4, {"a": 1.0})
    records, _ = read_records(path)
    assert [(r.step, dict(r.values)) for r in records] == [
        (3, {"a": 1}),
        (2, {"a": 1}),
        (4, {"a": 1}),
    ]


def test_further_names_of_a_step_are_added(path: Path) -> None:
    with Journal(path) as journal:
        assert journal.metrics(1, {"train/loss": 1.0})
        assert journal.metrics(1, {"train/loss": 9.0, "val-core/accuracy": 0.5})
        assert not journal.metrics(1, {"val-core/accuracy": 0.6})
    assert [dict(r.values) for r in read_records(path)[0]] == [
        {"train/loss": 1.0},
        {"val-core/accuracy": 0.5},
    ]


def test_non_finite_values_survive_strict_json(path: Path) -> None:
    values = {"nan": math.nan, "up": math.inf, "down": -math.inf, "tiny": 5e-324}
    with Journal(path) as journal:
        journal.metrics(0, values)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    stored = json.loads(path.read_bytes(), parse_constant=refuse)["values"]
    assert stored == {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "tiny": 5e-324}
    restored = read_records(path)[0][0].values
    assert math.isnan(restored["nan"])
    assert {name: restored[name] for name in ("up", "down", "tiny")} == {
        name: values[name] for name in ("up", "down", "tiny")
    }


@settings(max_examples=60, deadline=None)
@given(entries=ENTRIES, data=st.data())
def test_fault_row_22_any_truncation_loses_the_torn_record_only(
    entries: list[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.jsonl"
    with Journal(path) as journal:
        write(journal, entries)
    whole = path.read_bytes()
    all_records, end = read_records(path)
    assert end == len(whole)
    cut = data.draw(st.integers(0, len(whole)))
    os.truncate(path, cut)
    num_kept = whole[:cut].count(b"\n")
    seen, offset = read_records(path)
    assert same(seen, all_records[:num_kept])
    assert whole[:offset] == b"".join(whole.splitlines(keepends=True)[:num_kept])
    with Journal(path) as journal:
        assert path.stat().st_size == offset
        # The same work done again leaves every metric once, with the value it had.
        write(journal, entries)
    repeated: dict[tuple[int, str], str] = {}
    for record in read_records(path)[0]:
        for name, value in record.values.items():
            assert (record.step, name) not in repeated
            repeated[record.step or 0, name] = repr(value)
    assert repeated == {
        (r.step or 0, name): repr(value) for r in all_records for name, value in r.values.items()
    }


@pytest.mark.parametrize("tail", [b"\x00" * 300, b"\x00" * 300 + b"\n", b'{"kind":"log"', b"]\n"])
def test_rubbish_at_the_end_is_cut(path: Path, tail: bytes) -> None:
    with Journal(path) as journal:
        journal.log("kept")
    size_bytes = path.stat().st_size
    with path.open("ab") as file:
        file.write(tail)
    assert [r.message for r in read_records(path)[0]] == ["kept"]
    with Journal(path) as journal:
        assert path.stat().st_size == size_bytes
        journal.log("after")
    assert [r.message for r in read_records(path)[0]] == ["kept", "after"]


def test_damage_in_the_middle_raises_and_changes_nothing(path: Path) -> None:
    with Journal(path) as journal:
        for i in range(3):
            journal.log(f"line {i}")
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1].replace(b'"log"', b'"lag"') + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=f"damaged record at byte {len(lines[0])}"):
        Journal(path)
    assert path.read_bytes() == damaged


def test_a_follower_reads_each_record_once(path: Path) -> None:
    assert read_records(path) == ([], 0)
    messages, offset = [], 0
    with Journal(path) as journal:
        for i in range(5):
            journal.log(str(i))
            records, offset = read_records(path, offset)
            messages += [r.message for r in records]
    with path.open("ab") as file:
        file.write(b'{"kind":"log","time_ms":9')
        file.flush()
        assert read_records(path, offset) == ([], offset)
        file.write(b'9999999999999,"message":"late"}\n')
        file.flush()
        records, offset = read_records(path, offset)
    assert [*messages, *(r.message for r in records)] == ["0", "1", "2", "3", "4", "late"]


def test_fault_row_25_time_never_runs_backwards(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(path) as journal:
        journal.log("now")
    first = read_records(path)[0][0].time_ms
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    with Journal(path) as journal:
        journal.log("clock stepped back")
    assert [r.time_ms for r in read_records(path)[0]] == [first, first]


@pytest.mark.parametrize("point", ["journal.before_write", "journal.after_write"])
def test_fault_row_7_a_full_disk_leaves_whole_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with Journal(path) as journal:
        journal.metrics(1, {"a": 1.0})
        monkeypatch.setenv("RLHF_FAULTS", f"{point}=enospc")
        monkeypatch.setattr(waiting, "ROOM_DEADLINE_S", 0.0)
        with pytest.raises(DeadlineError, match=r"waiting for room on the disk of .*journal.jsonl"):
            journal.metrics(2, {"a": 2.0})
        assert journal.metrics(2, {"a": 2.0})
    assert [r.step for r in read_records(path)[0]] == [1, 2]


@pytest.mark.parametrize("point", ["journal.before_write", "journal.after_write"])
def test_a_record_waits_for_room(path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    monkeypatch.setattr(waiting, "ROOM_POLL_S", 0.01)
    with Journal(path) as journal:
        monkeypatch.setenv("RLHF_FAULTS", f"{point}=enospc")
        assert journal.metrics(1, {"a": 1.0})
        monkeypatch.setenv("RLHF_FAULTS", f"{point}=eio")
        monkeypatch.setattr(faults, "_passes", Counter())
        with pytest.raises(OSError, match="injected"):
            journal.metrics(2, {"a": 2.0})
    assert [r.step for r in read_records(path)[0]] == [1]


def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
        journal.log("a message that is longer than seven bytes")
        monkeypatch.undo()
    assert [r.message for r in read_records(path)[0]] == [
        "a message that is longer than seven bytes"
    ]


@pytest.mark.parametrize(("point", "num_before"), [("before_write", 2), ("after_write", 3)])
def test_fault_row_22_killed_writer_loses_no_returned_record(
    path: Path, point: str, num_before: int
) -> None:
    program = (
        "import sys; from pathlib import Path; from infra.tracking.journal import Journal\n"
        "j = Journal(Path(sys.argv[1]))\n"
        "for i in range(5): j.metrics(i, {'a': i}); print(i, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=env.child_environment(RLHF_FAULTS=f"journal.{point}=kill@3", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]
    assert [r.step for r in read_records(path)[0]] == list(range(num_before))


@given(data=st.binary(max_size=120))
def test_any_bytes_raise_only_our_errors(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(data)
    try:
        _, offset = read_records(path)
    except JournalError:
        return
    assert offset <= len(data)
