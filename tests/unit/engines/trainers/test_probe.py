"""The probe against logprobs by hand: one replica is off, one token is off, nothing is off."""

import json
import math
from pathlib import Path

import pytest
import torch

from engines.errors import WeightSyncError
from engines.trainers.mismatch import (
    NUM_NEW_TOKENS,
    NUM_PROMPT_TOKENS,
    MismatchGate,
    WeightProbe,
    probe_prompt,
)
from engines.types import Completion, TokenBatch

TRAINER = -0.5


def probe(bound: float = 1e-4) -> WeightProbe:
    def infer(batch: TokenBatch) -> torch.Tensor:
        return torch.full((batch.num_tokens,), TRAINER)

    return WeightProbe((4, 5, 6), 1.0, MismatchGate(bound, math.inf), infer)


def check(*logprobs: tuple[float, ...], bound: float = 1e-4) -> None:
    one = probe(bound)
    requests = [one.request(place, 7) for place in range(len(logprobs))]
    found = [
        Completion(request.request_id, 0, (1,) * len(row), row, (7,) * len(row), "length")
        for request, row in zip(requests, logprobs, strict=True)
    ]
    one.check(requests, found)


def test_what_agrees_passes_whatever_its_length() -> None:
    check((TRAINER,) * 4, (TRAINER,), (TRAINER + 5e-5, TRAINER))


def test_probe_names_the_one_replica_that_differs() -> None:
    with pytest.raises(WeightSyncError, match="probe/version=7/replica=1: after the sync .* 1.5 "):
        check((TRAINER,) * 4, (TRAINER - 1.5,) * 4, (TRAINER,) * 4)


def test_one_token_that_rounding_moved_stops_nothing_in_bfloat16() -> None:
    check((TRAINER, TRAINER - 2.0, TRAINER + 0.02, TRAINER), bound=0.1)
    with pytest.raises(WeightSyncError):
        check((TRAINER - 0.2, TRAINER - 2.0, TRAINER + 0.3, TRAINER), bound=0.1)


def test_no_number_is_no_agreement() -> None:
    with pytest.raises(WeightSyncError, match="nan"):
        check((math.nan,) * 4)


def test_the_prompt_spares_tokens_that_stand_for_images(tmp_path: Path) -> None:
    config = {"vocab_size": 8, "image_token_id": 5, "eos_token_id": [2, 3], "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = probe_prompt(tmp_path, 4096)
    assert len(prompt) == NUM_PROMPT_TOKENS
    assert set(prompt) == {0, 1, 2, 3, 4, 6, 7}
    assert probe_prompt(tmp_path, 4096) == prompt
    assert len(probe_prompt(tmp_path, 32)) == 32 - NUM_NEW_TOKENS
