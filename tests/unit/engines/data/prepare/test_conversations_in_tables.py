"""Conversations in tables of text are JSON text, and become the rows that lists become."""

import csv
import json
from pathlib import Path
from typing import Any

import loaded_rows
import pytest
from loaded_rows import write_rows

from engines.config.data import SourceConfig
from engines.data.read.row_files import PREFERENCE_FORMAT, RowFile
from engines.data.read.rows import Message, PreferenceRow
from infra.errors import ConfigError

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": 'What is "2+2"?'}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in "45")
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("rl", {"prompt": [SYSTEM, ASKED], "reward_model": {"ground_truth": "4"}}),
    ("sft", {"messages": [SYSTEM, ASKED, FOUR]}),
    ("preference", {"prompt": [SYSTEM, ASKED], "chosen": "4", "rejected": "5"}),
    ("preference", {"prompt": [SYSTEM, ASKED], "chosen": [FOUR], "rejected": [FIVE]}),
    ("preference", {"chosen": [SYSTEM, ASKED, FOUR], "rejected": [SYSTEM, ASKED, FIVE]}),
    (
        "preference",
        {
            "prompt": [SYSTEM, ASKED],
            "chosen": [SYSTEM, ASKED, FOUR],
            "rejected": [SYSTEM, ASKED, FIVE],
        },
    ),
]


def table(path: Path, row: dict[str, Any], write: Any = json.dumps) -> SourceConfig:
    writers = {str: str, dict: json.dumps, list: write}
    texts = {key: writers[type(value)](value) for key, value in row.items()}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, list(row), dialect="excel-tab" if path.suffix == ".tsv" else "excel"
        )
        writer.writeheader()
        writer.writerow(texts)
    return SourceConfig(path=str(path))


def load(source: SourceConfig, split: str) -> Any:
    (row,) = loaded_rows.load(split, source).rows
    return row


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize(("split", "row"), ROWS)
def test_a_table_holds_what_a_file_with_types_holds(
    tmp_path: Path, split: str, row: dict[str, Any], suffix: str
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row), encoding="utf-8")
    expected = load(SourceConfig(path=str(tmp_path / "t.jsonl")), split)
    assert expected.prompt == (Message(**SYSTEM), Message(**ASKED))
    assert load(table(tmp_path / f"t{suffix}", row), split) == expected


@pytest.mark.parametrize(("split", "row"), ROWS)
def test_lists_as_pandas_writes_them_are_refused(
    tmp_path: Path, split: str, row: dict[str, Any]
) -> None:
    # `DataFrame.to_csv` writes a list as Python would show it.
    with pytest.raises(ConfigError, match="not JSON"):
        load(table(tmp_path / "t.csv", row, repr), split)


@pytest.mark.parametrize("text", ["[1, 2] is?", "[1, 2]", "[{}]", "[" * 100_000, "9" * 5000])
def test_other_texts_in_brackets_stay_texts(tmp_path: Path, text: str) -> None:
    row = {"prompt": text, "chosen": f"{text} 1", "rejected": text}
    assert load(table(tmp_path / "t.csv", row), "preference") == PreferenceRow(
        (Message("user", text),), f"{text} 1", text
    )


def test_a_list_that_is_partly_messages_is_refused(tmp_path: Path) -> None:
    source = table(tmp_path / "t.csv", {"prompt": [ASKED, 1], "chosen": "4", "rejected": "5"})
    with pytest.raises(ConfigError, match=r"prompt\[1\] is an integer; need an object with role"):
        load(source, "preference")


@pytest.mark.parametrize("split", ["rl", "sft"])
@pytest.mark.parametrize("name", ["prompt", "answer"])
def test_the_layout_of_texts_refuses_conversations(tmp_path: Path, name: str, split: str) -> None:
    source = table(tmp_path / "t.csv", {"prompt": "q", "answer": "a", name: [SYSTEM, ASKED]})
    if (name, split) == ("answer", "rl"):
        # A ground truth is any text.
        assert load(source, split).reward_model.ground_truth == json.dumps([SYSTEM, ASKED])
        return
    with pytest.raises(ConfigError, match=f"{name} is a list of messages as JSON text; need the t"):
        load(source, split)


def test_answers_that_are_messages_in_json_come_back_as_they_are(tmp_path: Path) -> None:
    row = PreferenceRow((Message("user", "As JSON?"),), json.dumps([ASKED, FOUR]), "no")
    path, format = tmp_path / "preference.parquet", PREFERENCE_FORMAT
    write_rows(path, format, [row])
    assert tuple(RowFile(path, format)) == (row,)
