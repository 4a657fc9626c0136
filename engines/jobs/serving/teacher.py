"""A teacher in rollout engines of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.config.algorithm import DistillationConfig
from engines.config.sections import RLConfig
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import FrozenModel, LaunchedEngines, replica_beside
from engines.jobs.process.policy import copy_hf_files
from engines.jobs.process.role_sources import teacher_source
from engines.jobs.process.runtime import JobContext
from engines.trainers.teacher import ServedTeacher
from engines.training.spec import TEACHER, ModelSource
from engines.types import TokenBatch


def served_teacher(
    context: JobContext[Any],
    config: DistillationConfig | None,
    policy: ModelSource,
    max_length: int,
    like: ReplicaSpec,
    *,
    embedded: bool,
) -> FrozenModel | None:
    """Return the checked teacher with its engines; None if no engine serves a teacher.

    `max_length` is the policy's context. `embedded` is True if the policy's engine is in this
    process.
    """
    if config is None or config.served is None:
        return None
    given, engine, served = context.optional_input("teacher"), like.rollout.engine, config.served
    weights_dir = teacher_source(config, given, policy, max_length, engine).hf_dir
    serving_dir = context.attempt_dir / TEACHER
    copy_hf_files(weights_dir, serving_dir)
    return FrozenModel(
        replica_beside(like, serving_dir, served.num_replicas, served.options, embedded=embedded),
        weights_dir,
    )


@contextmanager
def asked_teacher(
    rl: RLConfig, teacher: FrozenModel, engines: LaunchedEngines, vocab_size: int
) -> Iterator[ServedTeacher]:
    """Yield a served teacher after a test query; raise RolloutError if it cannot answer."""
    if rl.distillation is None:
        raise ValueError("nothing is learned from a teacher")
    with teacher.served_by(engines) as service:
        asked = ServedTeacher(
            rl.distillation, service.prompt_logprobs, rl.sampling.temperature, vocab_size
        )
        asked.columns(TokenBatch.from_sequences([[0, 0]], loss_mask=[[0.0, 1.0]]))
        yield asked
