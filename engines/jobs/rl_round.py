"""Job `rl_round`: one round of RL, from policy to policy.

From a round's policy, a round continues the optimizers of policy and critic; else they are new.
The reference is loaded only for a KL term; the teacher on the ranks or in engines of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engines.checkpoint.model_directory import resolve_model
from engines.checkpoint.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import DistillationConfig
from engines.config.rules.algorithm import num_spare_tokens
from engines.config.rules.models import check_seen_by_judges, check_seen_by_teacher
from engines.config.sections import RLConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.launch import launch_policy_beside, policy_replica
from engines.controller.model_worker import WorkerSpec, role_checkpoint
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import FrozenModel, LaunchedEngines, Rollout, replica_beside
from engines.controller.worker_group import WorkerGroup
from engines.data.read.dataset import load_dataset
from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.tokenizer import ChatTokenizer, check_same_tokens, text_config
from engines.jobs.process.policy import (
    CHECKPOINT_DIR,
    HF_DIR,
    copy_hf_files,
    initial_source,
    policy_source,
    trained_steps,
    write_hf_files,
)
from engines.jobs.process.policy_stage import (
    local_reward,
    policy_output,
    policy_tokenizer,
    prompts_within,
    queueing,
    stage_progress,
)
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.serving.frozen_models import JUDGE, asked_judges, judge_source, reward_role
from engines.judges.asking import Judges
from engines.rewards.resolve import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.mismatch import probe_prompt
from engines.trainers.prompts import PromptSource
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import CompletionScorer
from engines.trainers.teacher import ServedTeacher
from engines.training.backends.merging import exported_policy
from engines.training.spec import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    TEACHER,
    ModelSource,
    RoleName,
    RoleSpec,
)
from engines.types import TokenBatch
from engines.vision.processor import prompt_images
from infra.errors import ConfigError
from infra.names import renamed_sections


def rl_round(context: JobContext[RLRoundStageConfig]) -> JobOutput:
    """Generate, score and train for one round."""
    config, rl = context.config, context.config.rl
    with ExitStack() as stack:
        with context.clock("load"):
            rewards = stack.enter_context(RewardScorer(local_reward(context, rl.reward)))
            prepare_torch(
                config.hardware,
                config.training.num_threads,
                context.journal.log,
                computes=config.driver_computes,
                trains_with=config.training.backend,
            )
            worker_spec = _worker_spec(context)
            hf_dir = worker_spec.serving_dir
            tokenizer = policy_tokenizer(hf_dir)
            prompts = _prompts(context, stack, hf_dir, tokenizer)
            workers, rollout, judges, teacher = _launch(context, stack, worker_spec)
        progress = stage_progress(context, config.checkpoint, rl.num_steps_per_round)
        before = context.optional_input("policy")
        trainer = RLTrainer(
            config,
            workers=workers,
            rollout=rollout,
            prompts=prompts,
            scorer=CompletionScorer(
                rewards,
                tokenizer,
                rl.algorithm.overlong,
                rl.sampling.max_new_tokens,
                judges,
            ),
            progress=progress,
            probe_prompt=probe_prompt(hf_dir, config.model.max_length),
            vocab_size=int(text_config(hf_dir)["vocab_size"]),
            before=trained_steps(before) if before else None,
            attempt_dir=context.attempt_dir,
            teacher=teacher,
        )
        return policy_output(context, progress, hf_dir, trainer.train_round())


def _worker_spec(context: JobContext[RLRoundStageConfig]) -> WorkerSpec:
    """Return what each rank builds; writes the policy's configuration and tokenizer for serving."""
    config, roles = context.config, _roles(context)
    hf_dir = context.attempt_dir / HF_DIR
    write_hf_files(roles[POLICY].source.hf_dir, hf_dir, config.model.chat_template)
    return WorkerSpec(
        roles=roles,
        serving_dir=hf_dir,
        rollout=config.rollout,
        temperature=config.rl.sampling.temperature,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=context.spec.seed,
    )


def _prompts(
    context: JobContext[RLRoundStageConfig],
    stack: ExitStack,
    hf_dir: Path,
    tokenizer: ChatTokenizer,
) -> PromptSource:
    """Return the prompts, checked for length and for models that cannot see their images."""
    config, rl = context.config, context.config.rl
    dataset = load_dataset(context.input("dataset"))
    rows = MappedRows(dataset.rl_rows(), context.attempt_dir)
    stack.enter_context(closing(rows))
    images = prompt_images(hf_dir, dataset.images_path)
    prompts = prompts_within(
        rows, tokenizer, config.model.max_length, rl.sampling.max_new_tokens, images=images
    )
    check_data_sources(rl.reward, prompts.data_sources)
    if prompts.num_with_images:
        shown = f"{prompts.num_with_images} of {len(prompts)} rows show images"
        check_seen_by_judges(shown, rl.reward.model, rl.reward.judge)
        check_seen_by_teacher(shown, rl.distillation)
    return PromptSource(prompts, config, context.spec.seed, images)


def _launch(
    context: JobContext[RLRoundStageConfig], stack: ExitStack, spec: WorkerSpec
) -> tuple[WorkerGroup, Rollout, Judges, ServedTeacher | None]:
    """Start the ranks, the engines and the models beside them; the stack closes them.

    The teacher is None unless engines of its own serve one.
    """
    config, rl = context.config, context.config.rl
    like = policy_replica(spec, config.rollout, context.attempt_dir)
    embedded = config.driver_computes
    judge = judge_source(context, rl.reward.judge, like, embedded=embedded)
    teacher = served_teacher(
        context,
        rl.distillation,
        spec.roles[POLICY].source,
        config.model.max_length,
        like,
        embedded=embedded,
    )
    workers, rollout, beside = launch_policy_beside(
        spec,
        {
            name: model.replica
            for name, model in {JUDGE: judge, TEACHER: teacher}.items()
            if model is not None
        },
        context.attempt_dir,
        queueing(context, config.hardware),
    )
    stack.enter_context(closing(workers))
    stack.enter_context(closing(rollout))
    role, judge_engines = spec.roles.get(REWARD), beside.get(JUDGE)
    judges = asked_judges(rl.reward, context.spec.seed, role, workers, judge, judge_engines)
    asked = None
    if teacher is not None:
        vocab_size = int(text_config(spec.serving_dir)["vocab_size"])
        asked = stack.enter_context(asked_teacher(rl, teacher, beside[TEACHER], vocab_size))
    return workers, rollout, stack.enter_context(judges), asked


def _roles(context: JobContext[RLRoundStageConfig]) -> dict[RoleName, RoleSpec]:
    """Return the policy and the configured critic, reward model, reference and teacher."""
    config, rl = context.config, context.config.rl
    before = context.optional_input("policy")
    # After a rejected round this may be SFT's policy, whose optimizer state does not fit RL.
    restore = before is not None and trained_steps(before).stage == "rl_round"
    policy, reference = _sources(context)
    # An adapter belongs to the policy; a critic is trained in full.
    in_full = config.training.model_copy(update={"lora": None})
    roles: dict[RoleName, RoleSpec] = {
        POLICY: RoleSpec(
            source=policy,
            training=config.training,
            optimizer=rl.optimizer,
            restore_optimizer=restore,
        )
    }
    reward = reward_role(context, rl.reward.model, config.training)
    if reward is not None:
        roles[REWARD] = reward
    if rl.critic is not None:
        start = reward.source if reward and rl.critic.start == "reward_model" else None
        source = critic_source(policy, before, context.attempt_dir, start)
        if restore and source.checkpoint_dir is None:
            raise ConfigError(
                "rl.critic",
                f"got a critic in round {config.round}, and a policy whose round had none; need "
                "one from round 1 on; start again from round 1",
            )
        roles[CRITIC] = RoleSpec(
            source=source,
            training=in_full,
            optimizer=rl.critic.optimizer,
            model_type="value_model",
            restore_optimizer=restore,
        )
    if reference is not None:
        check_same_tokens(policy.hf_dir, reference.hf_dir)
        roles[REFERENCE] = RoleSpec(source=reference, training=config.training)
    if rl.distillation is not None and rl.distillation.served is None:
        given, limit = context.optional_input("teacher"), config.model.max_length
        roles[TEACHER] = RoleSpec(
            teacher_source(rl.distillation, given, policy, limit, config.rollout.engine), in_full
        )
    return roles


def _sources(context: JobContext[RLRoundStageConfig]) -> tuple[ModelSource, ModelSource | None]:
    """Return the weights of the policy, and of the reference if a KL term needs one."""
    config, inputs = context.config, context.spec.inputs
    initial = partial(
        initial_source,
        config.model,
        context.optional_input("model"),
        context.input("dataset"),
        context.spec.seed,
        context.attempt_dir,
    )
    start = None if "policy" in inputs else initial()
    policy = start or policy_source(context.input("policy"))
    if not config.rl.algorithm.needs_reference:
        return policy, None
    given = context.optional_input("reference")
    return policy, policy_source(given) if given else start or initial()


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
    return exported_policy(policy_dir, work_dir / "initial_critic") if policy_dir else policy


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


if __name__ == "__main__":
    run_job(RLRoundStageConfig, rl_round)
