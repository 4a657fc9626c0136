"""Rows written are rows read; equal rows are equal bytes."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded_rows import write_rows

from engines.data.read import row_files
from engines.data.read.raw_rows import rl_row
from engines.data.read.row_files import (
    RL_FORMAT,
    SFT_FORMAT,
    RowFile,
    RowFormat,
    write_batches,
)
from engines.data.read.rows import Message, RewardModel, RLRow, RowError, SFTRow
from infra.errors import ConfigError

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
words = text.filter(str.strip)
json_values = st.recursive(
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
rl_rows = st.builds(
    RLRow,
    data_source=words,
    prompt=words.map(lambda content: (Message("user", content),)),
    ability=st.just("") | words,
    reward_model=st.builds(RewardModel, st.just("rule"), json_values),
    extra_info=st.dictionaries(words, json_values, max_size=3),
)


def write(path: Path, format: RowFormat[Any], rows: Sequence[Any]) -> None:
    write_rows(path, format, rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(rl_rows, max_size=4))
def test_rl_rows_come_back_equal(tmp_path: Path, rows: list[RLRow]) -> None:
    write(tmp_path / "rl.parquet", RL_FORMAT, rows)
    assert tuple(RowFile(tmp_path / "rl.parquet", RL_FORMAT)) == tuple(rows)


def test_sft_rows_come_back_equal(tmp_path: Path) -> None:
    turns = tuple(Message(r, r * 2) for r in ("system", "user", "assistant", "user", "assistant"))
    rows = (SFTRow(turns, "a"), SFTRow(turns[:3], "b"))
    write(tmp_path / "sft.parquet", SFT_FORMAT, rows)
    assert tuple(RowFile(tmp_path / "sft.parquet", SFT_FORMAT)) == rows
    write(tmp_path / "none.parquet", SFT_FORMAT, ())
    assert tuple(RowFile(tmp_path / "none.parquet", SFT_FORMAT)) == ()


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    def row(info: dict[str, int]) -> RLRow:
        return RLRow("d", (Message("user", "q"),), "", RewardModel("rule", "1"), info)

    write(tmp_path / "a.parquet", RL_FORMAT, [row({"x": 1, "y": 2})] * 3000)
    write(tmp_path / "b.parquet", RL_FORMAT, [row({"y": 2, "x": 1})] * 3000)
    digests = {
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("a.parquet", "b.parquet")
    }
    assert len(digests) == 1
    assert pq.read_metadata(tmp_path / "a.parquet").metadata is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(rl_rows, max_size=12), st.data())
def test_batches_of_any_size_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[RLRow], draw: st.DataObject
) -> None:
    """Against pyarrow alone: a table of Python objects, written at once."""
    monkeypatch.setattr(row_files, "BATCH_ROWS", 2)
    monkeypatch.setattr(row_files, "_ROW_GROUP_ROWS", 4)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    parts = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    batches = [RL_FORMAT.batch(rows[start:end]) for start, end in parts]
    write_batches(tmp_path / "batches", RL_FORMAT, batches)
    table = pa.Table.from_pylist([columns_of(row) for row in rows], RL_FORMAT.schema)
    pq.write_table(
        table,
        tmp_path / "table",
        row_group_size=4,
        compression="zstd",
        store_schema=False,
        data_page_version="2.0",
    )
    assert (tmp_path / "batches").read_bytes() == (tmp_path / "table").read_bytes()


def columns_of(row: RLRow) -> dict[str, Any]:
    """As they are documented."""
    answer = row.reward_model.ground_truth
    is_text = isinstance(answer, str)
    return {
        "data_source": row.data_source,
        "prompt": [{"role": m.role, "content": m.content} for m in row.prompt],
        "ability": row.ability,
        "reward_model": {
            "style": row.reward_model.style,
            "ground_truth": answer if is_text else None,
            "ground_truth_json": None if is_text else plain_json(answer),
        },
        "extra_info": plain_json(row.extra_info),
    }


def plain_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def test_a_row_group_of_long_texts_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "BATCH_ROWS", 2)
    monkeypatch.setattr(row_files, "_ROW_GROUP_BYTES", 100)
    rows = [SFTRow((Message("user", "q"), Message("assistant", "a" * n)), "d") for n in [1, 90] * 4]
    for name, size in (("one", 8), ("many", 3)):
        starts = range(0, len(rows), size)
        batches = [SFT_FORMAT.batch(rows[start : start + size]) for start in starts]
        write_batches(tmp_path / name, SFT_FORMAT, batches)
        metadata = pq.read_metadata(tmp_path / name)
        assert [metadata.row_group(n).num_rows for n in range(4)] == [2, 2, 2, 2]
        assert tuple(RowFile(tmp_path / name, SFT_FORMAT)) == tuple(rows)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_the_columns_other_tools_see(tmp_path: Path) -> None:
    row = RLRow("d", (Message("user", "q"),), "math", RewardModel("rule", "7"), {"i": 3})
    other = RLRow("d", (Message("user", "r"),), "", RewardModel("rule", {"target": ["a"]}), {})
    write(tmp_path / "rl.parquet", RL_FORMAT, [row, other])
    columns = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    assert columns[0]["prompt"] == [{"role": "user", "content": "q"}]
    assert columns[0]["reward_model"]["ground_truth"] == "7"
    assert columns[1]["reward_model"]["ground_truth_json"] == '{"target":["a"]}'


def test_defaults_and_structs_of_other_tools() -> None:
    row = rl_row(
        {
            "prompt": [{"role": "user", "content": "q"}],
            "reward_model": {"style": None, "ground_truth": 4},
            "extra_info": {"split": "train", "index": 0},
            "images": None,
        }
    )
    assert row.data_source == "unknown"
    assert row.reward_model == RewardModel("rule", 4)
    assert row.extra_info == {"split": "train", "index": 0}
    with pytest.raises(RowError, match="reward_model is null; need style and ground_truth"):
        rl_row({"prompt": "q", "reward_model": None})


def test_a_file_that_holds_something_else(tmp_path: Path) -> None:
    write(
        tmp_path / "x.parquet",
        SFT_FORMAT,
        [SFTRow((Message("user", "q"), Message("assistant", "a")))],
    )
    with pytest.raises(ConfigError, match=r"x\.parquet row 0: prompt is null"):
        tuple(RowFile(tmp_path / "x.parquet", RL_FORMAT))
    with pytest.raises(ConfigError, match="does not exist"):
        tuple(RowFile(tmp_path / "none.parquet", RL_FORMAT))
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a parquet file"):
        tuple(RowFile(tmp_path / "bad.parquet", RL_FORMAT))
