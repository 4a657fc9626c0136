"""What the backend contract holds an engine's results against, and how near they have to be.

Adam turns rounding of a gradient near zero into a step of the full learning rate, so a run in
another order of sums drifts; a missing all-reduce of one norm weight is 50 times the tolerance.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rlhf.testing.plain_loop import (
    language_loss,
    load,
    logprobs_of,
    make_batch,
    plain_steps,
    values_of,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

LOSS, NORM, WEIGHT = 5e-5, 1e-4, 1e-3
"""After four steps: absolute tolerance of losses, relative of gradient norms, absolute of weights,
a tenth of one step of Adam."""
RESUMED = 5e-5
"""Relative, of everything a step reports, when sums are taken in another order."""
LOGPROB = 1e-5
"""Absolute, also of values."""


def columns(rows: list[list[float]], *which: int) -> list[float]:
    """Some numbers of each step, in one list."""
    return [row[i] for row in rows for i in which]


def check_steps(rows: list[list[float]], expected: list[tuple[float, float]]) -> None:
    """Losses and gradient norms of a run against those of the plain loop."""
    assert columns(rows, 0) == pytest.approx([loss for loss, _ in expected], abs=LOSS)
    assert columns(rows, 1) == pytest.approx([norm for _, norm in expected], rel=NORM)


def check_resumed(ours: list[list[float]], theirs: list[list[float]]) -> None:
    """A run that went on under another layout against one that was never stopped."""
    for our_step, their_step in zip(ours, theirs, strict=True):
        assert our_step == pytest.approx(their_step, rel=RESUMED)


def check_weights(final: dict[str, torch.Tensor], source: Path, scratch: Path) -> None:
    """Weights after all steps against those of the plain loop."""
    plain = cast(Any, load(source))
    plain_steps(plain, language_loss)
    plain.save_pretrained(scratch / "plain")
    expected = load_file(scratch / "plain" / "model.safetensors")
    worst = {name: float((final[name] - expected[name]).abs().max()) for name in final}
    assert max(worst.values()) < WEIGHT, worst


def check_logprobs(ours: list[float], model_dir: Path) -> None:
    """What an engine infers for the first batch against transformers with the same weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected, *_ = logprobs_of(model, make_batch(0))
    assert ours == pytest.approx(expected, abs=LOGPROB)


def check_values(ours: list[float], last: list[float], model_dir: Path) -> None:
    """The same of a value model, and what it says behind the last tokens."""
    model = AutoModelForTokenClassification.from_pretrained(
        model_dir, dtype=torch.float32, num_labels=1
    ).eval()
    expected, behind = values_of(model, make_batch(0))
    assert ours == pytest.approx(expected, abs=LOGPROB)
    assert last == pytest.approx(behind, abs=LOGPROB)


def written_model(source: Path, final: Path, target: Path) -> Path:
    """A model directory of the weights that a case streamed."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(final / "final.safetensors")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
