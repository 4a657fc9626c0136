"""Tables of text: what other writers write is read back, and every damage has its line."""

import csv
from collections.abc import Iterator
from pathlib import Path

import loaded_rows
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config.data import SourceConfig
from engines.data.prepare import readers
from engines.data.prepare.readers import BadRow, RawRow, read_file
from infra.errors import ConfigError


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def columns(path: Path) -> list[object]:
    return [row.columns if isinstance(row, RawRow) else row for row in read_file(path)]


def bad(place: str, problem: str) -> BadRow:
    return BadRow(place, problem, unreadable=True)


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_fields_in_quotes(tmp_path: Path, suffix: str, separator: str) -> None:
    lines = ["a|b", '"x|y"|"He said ""no"".\r\nThen\n\nnothing"', "", "1|", '|"\u00e9 "']
    path = write(tmp_path / f"t{suffix}", "\r\n".join(lines).replace("|", separator))
    assert columns(path) == [
        {"a": f"x{separator}y", "b": 'He said "no".\r\nThen\n\nnothing'},
        {"a": "1", "b": ""},
        {"a": "", "b": "\u00e9 "},
    ]
    # The record that takes four lines has the place of its first one.
    places = [row.place for row in read_file(path)]
    assert places == [f"t{suffix}:2", f"t{suffix}:7", f"t{suffix}:8"]


def test_byte_order_mark_and_spaces_in_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", b'\xef\xbb\xbf"a", b\n1, 2\n')
    assert columns(path) == [{"a": "1", "b": " 2"}]
    assert columns(write(tmp_path / "empty.csv", "")) == []
    assert columns(write(tmp_path / "header.csv", "a,b\n")) == []


def test_damaged_records_spare_the_others(tmp_path: Path) -> None:
    lines = [b"a,b", b"1,2", b"1,2,3", b"1,\xff2", b"1", b"3,4"]
    assert columns(write(tmp_path / "t.csv", b"\n".join(lines))) == [
        {"a": "1", "b": "2"},
        bad("t.csv:3", "3 fields; need 2, as in the header"),
        bad("t.csv:4", "byte 0xff in column 'b' is not UTF-8"),
        bad("t.csv:5", "1 field; need 2, as in the header"),
        {"a": "3", "b": "4"},
    ]


MISQUOTED = (
    r"the record that begins here is quoted wrongly \(',' expected after '\"'\), so what fol"
)


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        # The next record's opening quote closes the one that was left open.
        ('"never,5\n"6","x, y"\n"7,7",8\n', MISQUOTED),
        ('"1"x,2\n3,4\n', MISQUOTED),
        (
            '3,"4\n5,6\n7,8\n',
            "the record that begins here is cut off inside quotes, so what follows",
        ),
        ("5\r6,7\r", "a line ends with CR alone; need LF or CR LF; save the file with such line"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_behind_a_wrong_quote_no_record_is_known(
    tmp_path: Path, behind: str, said: str, on_bad_row: str
) -> None:
    path = write(tmp_path / "t.csv", f"prompt,answer\n1,2\n\n{behind}")
    read = read_file(path)
    assert next(read) == RawRow("t.csv:2", {"prompt": "1", "answer": "2"})
    with pytest.raises(ConfigError, match=rf"^t\.csv:4: {said}"):
        next(read)
    source = SourceConfig(path=str(path), format="columns")
    with pytest.raises(ConfigError, match=r"^t\.csv:4: "):
        loaded_rows.load("rl", source, on_bad_row=on_bad_row)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"a,b,a\n1,2,3\n", r"t\.csv:1: column 'a' occurs twice; need different names"),
        (b"a;b\n1;2\n", r"t\.csv:1: columns are separated by ';'; need ','"),
        (b"a\tb\n1\t2\n", r"t\.csv:1: columns are separated by '\\t'; need ','"),
        (
            b"\xff\xfea,b\n",
            r"t\.csv:1: byte 0xff in column .*; need a header in UTF-8",
        ),
        (b'"a"x,b\n', r"t\.csv:1: the record that begins here is quoted wrongly"),
        (b"a,b\r1,2\r", r"t\.csv:1: a line ends with CR alone; need LF or CR LF"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, header: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        columns(write(tmp_path / "t.csv", header))
    str(caught.value).encode("utf-8")


def test_fields_longer_than_the_library_takes_by_itself(tmp_path: Path) -> None:
    answer = "long " * 100_000
    assert columns(write(tmp_path / "t.csv", f"a,b\n1,{answer}\n")) == [{"a": "1", "b": answer}]


def test_a_quote_that_is_never_closed_takes_a_bounded_part(tmp_path: Path) -> None:
    most = 16 * 2**20
    path = write(tmp_path / "t.csv", f'a,b\n0,"{"x" * most}"\n')
    assert columns(path) == [{"a": "0", "b": "x" * most}]
    line = "1,2\n"
    path = write(tmp_path / "t.csv", f'a,b\n0,"never\n{line * (most // 4)}{line * 10**6}')
    with path.open("rb") as file:
        records = readers.read_records(file, path, ",")
        with pytest.raises(ConfigError) as error:
            next(records)
        assert file.tell() < most + 100_000
    assert str(error.value) == (
        "t.csv:2: a field of the record that begins here has more than 16777216 characters; need "
        "fewer; close its quote, or keep such texts in .jsonl"
    )


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a\n" + "1\n" * 200_000)
    with path.open("rb") as file:
        records = readers.read_records(file, path, ",")
        assert isinstance(records, Iterator)
        assert next(records) == readers.RawRow("t.csv:2", {"a": "1"})
        assert file.tell() < 100_000


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=5))
@pytest.mark.parametrize(("name", "dialect"), [("t.csv", "excel"), ("t.tsv", "excel-tab")])
def test_what_python_writes_is_read_back(
    tmp_path: Path, name: str, dialect: str, rows: list[tuple[str, str]]
) -> None:
    with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, dialect).writerows([("a", "b"), *rows])
    assert columns(tmp_path / name) == [{"a": a, "b": b} for a, b in rows]


def test_what_arrow_writes_is_read_back(tmp_path: Path) -> None:
    rows = [{"a": 'x, "y"\nz', "b": "\u00e9"}, {"a": "", "b": "2"}]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "t.csv")
    assert columns(tmp_path / "t.csv") == rows


def test_a_table_becomes_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", 'question,answer\n"2, and 2?",4\n"3?",\n')
    options = {"prompt_column": "question"}
    source = SourceConfig(path=str(path), format="columns", options=options)
    with pytest.raises(ConfigError, match=r"^t\.csv:3: answer is empty \(1 such row;"):
        loaded_rows.load("rl", source)
    kept = loaded_rows.load("rl", source, on_bad_row="drop")
    (row,) = kept.rows
    assert row.prompt[0].content == "2, and 2?"
    assert row.reward_model.ground_truth == "4"
