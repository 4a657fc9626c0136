"""Samples of a round's steps that are kept for people, beside the journal of the attempt.

    attempt-<n>/samples/00000010.json      what step 10, over all rounds, kept

Promises: a step's file appears whole and is replaced whole, so an attempt that repeats a step
doubles nothing; the attempts of a generation are read as one, of a step that several of them did
the last; what is kept stays when the stage is committed.
Does not promise: that every step has a file. Nothing depends on one: a disk that is full costs it.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from infra.frozen_model import FrozenModel
from infra.store.atomic import atomic_write_bytes
from infra.store.stage_log import generation
from infra.store.storage import Storage
from infra.store.work_channel import SAMPLES_DIR

_log = logging.getLogger(__name__)


class KeptSample(FrozenModel):
    """One answer. Numbers that are not finite are None."""

    name: str
    """Request and number of the sample."""
    group: int
    """Place of its prompt within the step."""
    prompt: str
    tokens: tuple[str, ...]
    """Text of each token of the answer; of a long answer its two ends, half of them each."""
    num_tokens: int
    """Of the whole answer."""
    mismatch: tuple[float | None, ...] = ()
    """Logprob of the trainer minus that of the sampler, in nats, for each of `tokens`; empty where
    it was not measured."""
    score: float | None
    reward: float | None
    """The score with its shaping."""
    advantage: float | None = None
    """Mean over the answer's tokens; None for what was not trained on."""
    finish_reason: str
    extras: dict[str, float | None] = {}
    """What else the reward function reported."""


class KeptStep(FrozenModel):
    """What a step kept."""

    step: int
    """Over all rounds."""
    samples: tuple[KeptSample, ...]


def write_samples(attempt_dir: Path, kept: KeptStep) -> None:
    """Keep samples of a step; raises an `OSError` where the disk does."""
    directory = attempt_dir / SAMPLES_DIR
    directory.mkdir(exist_ok=True)
    atomic_write_bytes(directory / f"{kept.step:08d}.json", kept.model_dump_json().encode())


def read_samples(
    storage: Storage, fingerprint: str, attempt: int | None = None
) -> dict[int, KeptStep]:
    """What a generation of a stage kept, by step; a damaged file is left out.

    Args:
        storage: of the stage.
        fingerprint: of the stage.
        attempt: one of the generation; by default the newest.

    Returns:
        In the order of the steps.
    """
    files: dict[int, bytes] = {}
    for entry in generation(storage.attempts.entries(fingerprint), attempt):
        if entry.kind == "held":
            files |= storage.channel(fingerprint).read_samples(entry.number)
    return _parsed(files)


def within(
    steps: Mapping[int, Sequence[KeptSample]], max_bytes: int, max_num: int | None = None
) -> dict[int, Sequence[KeptSample]]:
    """All steps, or every second, fourth, ... and the last, so that whoever shows them can.

    Args:
        steps: samples by step.
        max_bytes: of their JSON; one step may have more.
        max_num: of samples; one step may have more. None: any number.

    Returns:
        Samples by step, in order.
    """
    sizes = {step: sum(len(s.model_dump_json()) for s in each) for step, each in steps.items()}
    chosen = sorted(steps)
    while len(chosen) > 1 and (
        sum(sizes[step] for step in chosen) > max_bytes
        or (max_num is not None and sum(len(steps[step]) for step in chosen) > max_num)
    ):
        chosen = chosen[::-1][::2][::-1]
    return {step: steps[step] for step in chosen}


def _parsed(files: Mapping[int, bytes]) -> dict[int, KeptStep]:
    steps: dict[int, KeptStep] = {}
    for step, data in sorted(files.items()):
        try:
            steps[step] = KeptStep.model_validate_json(data)
        except ValidationError as error:
            _log.warning("samples of step %d are damaged: %s", step, str(error).splitlines()[0])
    return steps
