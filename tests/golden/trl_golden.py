"""What `trl_numbers.json` says, and its inputs packed as ours; for both halves of the tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.types import TokenBatch

GOLDEN = json.loads(Path(__file__).with_name("trl_numbers.json").read_text(encoding="utf-8"))
EXACT = {"rel": 1e-12, "abs": 1e-14}
FLOAT32 = {"rel": 2e-6, "abs": 1e-6}
PROMPT = {"logprobs": -7.0, "old_logprobs": -2.0, "ref_logprobs": -9.0, "entropy": 9.0}
"""Of a token before each answer, with numbers that would be seen if they counted."""


def batch_of(step: Mapping[str, Any]) -> TokenBatch:
    """The answers packed, each behind one token of a prompt."""
    masks = step["mask"]
    columns = {name: column_of(step, name) for name in ("old_logprobs", "ref_logprobs")}
    advantage = [[9.0] + [x] * len(m) for x, m in zip(step["advantages"], masks, strict=True)]
    bare = TokenBatch.from_sequences(
        [[1] * (1 + len(mask)) for mask in masks], loss_mask=[[0.0, *mask] for mask in masks]
    )
    return bare.with_columns(advantages=flat(advantage), **columns)


def column_of(step: Mapping[str, Any], name: str) -> Tensor:
    return flat([[PROMPT[name], *row] for row in step[name]])


def flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def by_answer(values_T: Tensor, batch: TokenBatch) -> list[list[float]]:
    """Without the prompts, after a look at them."""
    rows = [row.tolist() for row in values_T.split(batch.lengths_B.tolist())]
    assert not any(row[0] for row in rows)
    return [row[1:] for row in rows]


def assert_same(found: Any, wanted: Any, tolerance: Mapping[str, float]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, **tolerance)
