"""The contract of a preprocessor: run it on your own, with rows as its files hold them.

    pytest tests/contracts/test_preprocessor.py --preprocessor NAME --rows FILE.jsonl

Covered: it is found by name, makes valid rows of every raw row, and of a row without the columns
that it names none; it is a pure function. Not covered: that the rows say what you mean.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.config.data import SourceConfig
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.prepare.sources import create_preprocessor
from engines.data.read.rows import PreferenceRow, RLRow, RowError, SFTRow

GSM8K_ROWS = [
    {"question": "2 and 2?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"},
    {"question": "1 and 2?", "answer": "#### 3"},
]


@pytest.fixture
def preprocessor(request: pytest.FixtureRequest) -> Preprocessor[Any]:
    """The named one, without options."""
    name = request.config.getoption("--preprocessor", default=None) or "gsm8k"
    return create_preprocessor(SourceConfig(format=name, path="rows.jsonl"), "data.rl.0")


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    path = request.config.getoption("--rows", default=None)
    if path is None:
        if request.config.getoption("--preprocessor", default=None):
            pytest.fail("--preprocessor needs --rows FILE.jsonl: raw rows that it can read")
        return GSM8K_ROWS
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_it_serves_some_kind_of_rows(preprocessor: Preprocessor[Any]) -> None:
    assert any((preprocessor.rl_columns, preprocessor.sft_columns, preprocessor.preference_columns))


def test_rows_become_rows_and_again(
    preprocessor: Preprocessor[Any], rows: list[dict[str, Any]]
) -> None:
    for raw in rows:
        before = json.dumps(raw)
        if preprocessor.rl_columns is not None:
            row = preprocessor.rl_row(raw)
            assert isinstance(row, RLRow)
            assert row.prompt
            assert preprocessor.rl_row(raw) == row
        if preprocessor.sft_columns is not None:
            row = preprocessor.sft_row(raw)
            assert isinstance(row, SFTRow)
            assert row.messages[-1].role == "assistant"
            assert preprocessor.sft_row(raw) == row
        if preprocessor.preference_columns is not None:
            row = preprocessor.preference_row(raw)
            assert isinstance(row, PreferenceRow)
            assert preprocessor.preference_row(raw) == row
        assert json.dumps(raw) == before


def test_a_row_without_its_columns_is_refused(preprocessor: Preprocessor[Any]) -> None:
    if preprocessor.rl_columns is not None:
        with pytest.raises(RowError):
            preprocessor.rl_row({})
    if preprocessor.sft_columns is not None:
        with pytest.raises(RowError):
            preprocessor.sft_row({})
    if preprocessor.preference_columns is not None:
        with pytest.raises(RowError):
            preprocessor.preference_row({})


def test_what_it_does_not_serve_is_refused(
    preprocessor: Preprocessor[Any], rows: list[dict[str, Any]]
) -> None:
    if preprocessor.rl_columns is None:
        with pytest.raises(RowError):
            preprocessor.rl_row(rows[0])
    if preprocessor.sft_columns is None:
        with pytest.raises(RowError):
            preprocessor.sft_row(rows[0])
    if preprocessor.preference_columns is None:
        with pytest.raises(RowError):
            preprocessor.preference_row(rows[0])
