"""Samples of RL steps, kept for people in `attempt-<n>/samples/<step>.json`.

Promises: a step's file is written and replaced atomically, so repeating a step adds no duplicates.
Readers see all attempts of a generation as one; the last attempt of a step wins. The files stay
after the commit.
Does not promise: a file for every step; on a full disk it is skipped.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes
from infra.store.storage import Storage
from infra.store.work_channel import SAMPLES_DIR

_log = logging.getLogger(__name__)


class KeptSample(FrozenModel):
    """One completion. Numbers that are not finite are None."""

    name: str
    """Request and number of the sample."""
    group: int
    """Index of its prompt within the step."""
    prompt: str
    tokens: tuple[str, ...]
    """Text of each token of the completion; of a long one only its first and last part."""
    num_tokens: int
    """Length of the whole completion."""
    mismatch: tuple[float | None, ...] = ()
    """Trainer logprob minus sampler logprob of each of `tokens`, in nats; empty if not measured."""
    score: float | None
    reward: float | None
    """The score with reward shaping."""
    advantage: float | None = None
    """Mean over the tokens of the completion; None if it was not trained on."""
    finish_reason: str
    extras: dict[str, float | None] = {}
    """Further values that the reward function returned."""


class KeptStep(FrozenModel):
    """Samples of one step."""

    step: int
    """Step number over all rounds."""
    samples: tuple[KeptSample, ...]


def write_samples(attempt_dir: Path, kept: KeptStep) -> None:
    """Write the samples of a step; raises `OSError` if the disk fails."""
    directory = attempt_dir / SAMPLES_DIR
    directory.mkdir(exist_ok=True)
    atomic_write_bytes(directory / f"{kept.step:08d}.json", kept.model_dump_json().encode())


def read_samples(
    storage: Storage, fingerprint: str, attempt: int | None = None
) -> dict[int, Sequence[KeptSample]]:
    """Return the samples of a generation of a stage, in step order; skips damaged files.

    `attempt` is any attempt of the generation; None means the newest generation.
    """
    files: dict[int, bytes] = {}
    for entry in storage.attempts.generation(fingerprint, attempt):
        if entry.kind == "held":
            files |= storage.channel(fingerprint).read_samples(entry.number)
    steps: dict[int, Sequence[KeptSample]] = {}
    for step, data in sorted(files.items()):
        try:
            steps[step] = KeptStep.model_validate_json(data).samples
        except ValidationError as error:
            _log.warning("samples of step %d are damaged: %s", step, str(error).splitlines()[0])
    return steps


def within(
    steps: Mapping[int, Sequence[KeptSample]], max_bytes: int, max_num: int | None = None
) -> dict[int, Sequence[KeptSample]]:
    """Thin out steps until their samples fit: every second, fourth, ... step and the last.

    `max_bytes` limits their JSON, `max_num` their number; a single remaining step may exceed both.
    """
    sizes = {step: sum(len(s.model_dump_json()) for s in each) for step, each in steps.items()}
    chosen = sorted(steps)
    while len(chosen) > 1 and (
        sum(sizes[step] for step in chosen) > max_bytes
        or (max_num is not None and sum(len(steps[step]) for step in chosen) > max_num)
    ):
        chosen = chosen[::-1][::2][::-1]
    return {step: steps[step] for step in chosen}
