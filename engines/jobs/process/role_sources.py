"""Where a round's critic and teacher get their first weights, and a teacher in its own engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.checkpoint.model_directory import resolve_model
from engines.checkpoint.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import DistillationConfig
from engines.config.rules.algorithm import num_spare_tokens
from engines.config.sections import RLConfig
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import FrozenModel, LaunchedEngines, replica_beside
from engines.data.read.tokenizer import check_same_tokens
from engines.jobs.process.exported_policy import exported_policy
from engines.jobs.process.policy import CHECKPOINT_DIR, HF_DIR, copy_hf_files
from engines.jobs.process.runtime import JobContext
from engines.trainers.teacher import ServedTeacher
from engines.training.spec import CRITIC, TEACHER, ModelSource, role_checkpoint
from engines.types import TokenBatch
from infra.names import renamed_sections


def teacher_source(
    config: DistillationConfig,
    given: Path | None,
    policy: ModelSource,
    max_length: int,
    rollout_engine: str,
) -> ModelSource:
    """Return the directory of the teacher's weights; a ConfigError names the bad field.

    `given` is a local directory, None for the hub. `max_length` is the policy's context.
    """
    with renamed_sections({"model": TEACHER_SECTION}):
        directory = given or resolve_model(config, max_length)
    check_teacher(
        config, directory, policy.hf_dir, max_length, num_spare_tokens(config, rollout_engine)
    )
    return ModelSource(directory)


def critic_source(
    policy: ModelSource,
    policy_dir: Path | None,
    work_dir: Path,
    reward_model: ModelSource | None = None,
) -> ModelSource:
    """Return the first weights of a critic: the last critic's, else a reward model's or policy's.

    A policy's checkpoint has no value head and may have any layout: its weights are exported once,
    with an adapter merged in, and the missing head starts at 0.

    Args:
        policy_dir: artifact of the policy; None if it is a Hugging Face directory.
        work_dir: directory for exported weights.
        reward_model: first weights, with head, of the first round's critic; its tokens must be
            those of the policy (ConfigError). None: the policy.
    """
    if policy_dir is not None:
        before = role_checkpoint(policy_dir / CHECKPOINT_DIR, CRITIC)
        if before.exists():
            # The critic has the shape of its own first weights.
            return ModelSource(
                policy_dir / HF_DIR if reward_model is None else reward_model.hf_dir, before
            )
    if reward_model is not None:
        check_same_tokens(policy.hf_dir, reward_model.hf_dir, "rl.critic.start", "a reward model")
        return reward_model
    if policy_dir is None:
        return policy
    return exported_policy(policy_dir, work_dir / "initial_critic")


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
