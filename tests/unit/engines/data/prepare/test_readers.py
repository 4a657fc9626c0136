"""Readers: every kind of file, every kind of damage, with the place in the message."""

import errno
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.data.prepare.readers import BadRow, RawRow, read_file
from infra.errors import ConfigError

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "\u00e9"}]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_rows(path: Path) -> list[RawRow | BadRow]:
    return list(read_file(path))


def columns(path: Path) -> list[object]:
    return [row.columns if isinstance(row, RawRow) else row for row in read_file(path)]


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    paths = [
        tmp_path / "t.parquet",
        write(tmp_path / "t.jsonl", lines + "\n"),
        write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + lines.replace("\n", "\r\n\r\n").encode()),
        write(tmp_path / "list.json", json.dumps(ROWS, indent=1)),
        write(tmp_path / "lines.json", lines),
    ]
    assert all(columns(path) == ROWS for path in paths)
    assert columns(write(tmp_path / "one.json", json.dumps(ROWS[0], indent=1))) == ROWS[:1]
    assert [row.place for row in read_rows(tmp_path / "t.jsonl")] == ["t.jsonl:1", "t.jsonl:2"]
    assert read_rows(tmp_path / "t.parquet")[1].place == "t.parquet row 1"
    assert read_rows(tmp_path / "bom.jsonl")[1].place == "bom.jsonl:3"


def test_bad_json_line_names_line_and_column(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "ok"})
    path = write(tmp_path / "train.jsonl", f'{good}\n{{"prompt": "a" "b"}}\n{good}\n')
    rows = read_rows(path)
    assert isinstance(rows[0], RawRow)
    assert isinstance(rows[2], RawRow)
    assert rows[1] == BadRow(
        "train.jsonl:2",
        'not JSON (Expecting \',\' delimiter at column 16): {"prompt": "a" "b"}',
        unreadable=True,
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"p": "a\xff"}', "byte 0xff at column 9 is not UTF-8"),
        (b"[1, 2]", "a JSON list; need an object"),
        (b'{"p": NaN}', "not JSON (NaN is not a JSON number)"),
        (
            b"[" * 100_000,
            "not JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode "
            "string)",
        ),
        (b'{"p": "' + b"y" * 100, "...{}"),
    ],
)
def test_damaged_lines(tmp_path: Path, line: bytes, problem: str) -> None:
    row = read_rows(write(tmp_path / "t.jsonl", line + b"\n"))[0]
    assert isinstance(row, BadRow)
    assert row.unreadable
    if problem == "...{}":
        assert row.problem.endswith("...")
        assert len(row.problem) < 120
    else:
        assert row.problem == problem


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv"])
def test_packed_files(tmp_path: Path, name: str) -> None:
    text = {"t.jsonl": '{"a": "1"}\n{\n', "t.json": '[{"a": "1"}]', "t.csv": "a\n1\n1,2\n"}[name]
    plain = read_rows(write(tmp_path / name, text))
    packed = gzip.compress(text.encode())
    again = read_rows(write(tmp_path / f"{name}.gz", packed))
    assert [row.place for row in again] == [row.place.replace(name, f"{name}.gz") for row in plain]
    assert again[0] == RawRow(again[0].place, {"a": "1"})
    for damaged in (packed[:-9], b"text", packed[:14] + b"\xff\xff" + packed[16:]):
        path = write(tmp_path / f"{name}.gz", damaged)
        with pytest.raises(ConfigError, match=r"\.gz: not a whole gzip file \(.*copy it again"):
            read_rows(path)


def test_damaged_documents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"d\.json:2: not JSON \(Expecting value at column 1\)"):
        read_rows(write(tmp_path / "d.json", "[1,\n}"))
    with pytest.raises(ConfigError, match=r"e\.json:2: byte 0xff at column 2 is not UTF-8"):
        read_rows(write(tmp_path / "e.json", b"[1,\n \xff]"))
    with pytest.raises(ConfigError, match="not a parquet file"):
        read_rows(write(tmp_path / "f.parquet", "hello, this is text"))
    assert read_rows(write(tmp_path / "empty.jsonl", "\n\n")) == []


def test_a_text_that_is_not_utf8_in_parquet(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"a\xff"], pa.binary())
    text = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"p": text}), tmp_path / "t.parquet")
    rows = read_rows(tmp_path / "t.parquet")
    assert isinstance(rows[0], RawRow)
    assert rows[1] == BadRow("t.parquet row 1", "byte 0xff of a text is not UTF-8", unreadable=True)


def parquet(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
    return path


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([0, 10**8], pa.date32()),
        pa.array([None, 1], pa.timestamp("us", "Nowhere/Atlantis")),
        pa.array([None, 2**62], pa.timestamp("us")),
        pa.array([None, {"at": 10**8}], pa.struct([("at", pa.date32())])),
    ],
)
def test_a_cell_that_python_has_no_value_for(tmp_path: Path, cells: pa.Array) -> None:
    good, bad = read_file(parquet(tmp_path / "t.parquet", p=pa.array(["a", "b"]), odd=cells))
    assert isinstance(good, RawRow)
    assert good.columns["p"] == "a"
    assert isinstance(bad, BadRow)
    assert (bad.place, bad.unreadable) == ("t.parquet row 1", True)
    assert re.fullmatch(r"column 'odd' cannot be read \(\w+: .*\); mend or .*", bad.problem)


def test_a_damaged_page_names_the_file_and_the_row_group(tmp_path: Path) -> None:
    table = pa.table({"p": [f"{place:100}" for place in range(60)]})
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=30)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)
    rows = read_file(path)
    assert [next(rows).place for _ in range(30)][-1] == "t.parquet row 29"
    with pytest.raises(ConfigError) as error:
        next(rows)
    assert str(error.value).startswith(f"{path}: row group 1 cannot be read (")
    assert str(error.value).endswith("; copy it again")


def test_a_disk_that_fails_under_a_table_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Iterator[pa.RecordBatch]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    path = parquet(tmp_path / "t.parquet", p=pa.array(["a"]))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_rows(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data(), compression=st.sampled_from(["none", "snappy", "zstd"]))
def test_any_damage_of_a_table_is_rows_or_our_own_error(
    tmp_path: Path, data: st.DataObject, compression: str
) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table(
        {"p": ["some text", None, "more"], "n": [1, 2, 3], "m": [[{"a": "x"}], [], None]}
    )
    pq.write_table(table, path, compression=compression)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        rows = read_rows(path)
    except ConfigError:
        return
    assert all(isinstance(row, RawRow | BadRow) for row in rows)


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom file permissions bind (not root)")
def test_a_file_that_may_not_be_read_is_not_a_user_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "{}")
    path.chmod(0)
    with pytest.raises(PermissionError):
        read_rows(path)


def test_a_failing_disk_is_not_an_absent_file(tmp_path: Path) -> None:
    # A directory under the file's name: reading fails with an OSError that is not "absent".
    (tmp_path / "t.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        read_rows(tmp_path / "t.jsonl")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(content=st.binary(max_size=80) | st.text(max_size=60).map(str.encode))
@pytest.mark.parametrize(
    "name", ["f.json", "f.jsonl", "f.parquet", "f.csv", "f.tsv", "f.jsonl.gz", "f.csv.gz"]
)
def test_any_bytes_are_rows_or_our_own_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = write(tmp_path / name, content)
    try:
        rows = read_rows(path)
    except ConfigError:
        return
    assert all(isinstance(row, RawRow | BadRow) for row in rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_one_changed_byte_spares_the_other_lines(tmp_path: Path, data: st.DataObject) -> None:
    lines = [json.dumps({"i": i, "t": "text"}).encode() for i in range(5)]
    broken = data.draw(st.integers(0, 4))
    place = data.draw(st.integers(0, len(lines[broken]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != ord("\n")))
    changed = lines[broken][:place] + bytes([byte]) + lines[broken][place + 1 :]
    rows = read_rows(
        write(tmp_path / "t.jsonl", b"\n".join([*lines[:broken], changed, *lines[broken + 1 :]]))
    )
    by_place = {row.place: row for row in rows}
    for i, line in enumerate(lines):
        if i != broken:
            row = by_place[f"t.jsonl:{i + 1}"]
            assert isinstance(row, RawRow)
            assert row.columns == json.loads(line)
