"""Rows on disk are the rows that were added: all, some, or a sample in another order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.data.prepare import stored_rows
from engines.data.prepare.stored_rows import (
    StoredRows,
    digest_of,
    prompt_digest,
    stored,
    writing_rows,
)
from engines.data.read.row_files import RL_FORMAT
from engines.data.read.rows import Message, RewardModel, RLRow

words = st.sampled_from(["a", " a", "a\n", "b", "é", "数学 x"])
rl_rows = st.lists(
    st.builds(
        RLRow,
        data_source=st.sampled_from("xyz"),
        prompt=words.map(lambda text: (Message("user", text),)),
        ability=st.just(""),
        reward_model=st.builds(RewardModel, st.just("rule"), st.integers()),
    ),
    max_size=40,
)
no_matter = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are many batches and runs."""
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", 4)
    monkeypatch.setattr(stored_rows, "_MIN_RUN_ROWS", 3)
    monkeypatch.setattr(stored_rows, "_MAX_RUNS", 5)


def distinct_prompts(rows: list[RLRow]) -> int:
    return len({tuple((m.role, m.content.strip()) for m in row.prompt) for row in rows})


def is_same(found: StoredRows[Any], rows: list[RLRow]) -> None:
    assert list(found) == rows
    assert len(found) == len(rows)
    assert list(found.prompt_digests()) == [prompt_digest(row.prompt) for row in rows]
    assert found.num_distinct_prompts() == distinct_prompts(rows)
    names = [row.data_source for row in rows]
    assert found.num_by_source() == {name: names.count(name) for name in sorted({*names})}


@no_matter
@given(rl_rows, st.data())
def test_rows_come_back(tmp_path: Path, rows: list[RLRow], draw: st.DataObject) -> None:
    found = stored(tmp_path / "rows", RL_FORMAT, rows)
    is_same(found, rows)
    for _ in range(2):
        chosen = draw.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        found = found.only([place for place, kept in enumerate(chosen) if kept])
        rows = [row for row, kept in zip(rows, chosen, strict=True) if kept]
        is_same(found, rows)


@no_matter
@given(rl_rows, rl_rows, rl_rows, st.data())
def test_a_sample_among_other_rows(
    tmp_path: Path,
    before: list[RLRow],
    rows: list[RLRow],
    after: list[RLRow],
    draw: st.DataObject,
) -> None:
    order = draw.draw(st.permutations(range(len(rows))))
    order = order[: draw.draw(st.integers(0, len(rows)))]
    whole = stored(tmp_path / "whole", RL_FORMAT, rows)
    with writing_rows(tmp_path / "rows", RL_FORMAT) as writer:
        for row in before:
            writer.add(row)
        writer.add_sample(whole, np.array(order, np.int64))
        for row in after:
            writer.add(row)
    is_same(writer.stored(), [*before, *(rows[number] for number in order), *after])
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "rows"}


def test_texts_that_lie_differently_have_other_digests() -> None:
    assert digest_of(["a", "b"]) != digest_of(["ab"]) != digest_of(["b", "a"])
    one, other = (Message("user", "a"), Message("user", "b")), (Message("user", "auserb"),)
    assert prompt_digest(one) != prompt_digest(other)
