"""Job `rl_round`: one round of RL, policy to policy.

Round 1 starts a fresh optimizer from the policy it is given; a later round continues the
optimizer of the round before, and its critic's. The reference is loaded only for a KL.
"""

from contextlib import ExitStack, closing

from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.launch import launch_judged_policy, policy_replica
from engines.controller.model_worker import WorkerSpec
from engines.data.read.dataset import load_dataset
from engines.data.read.tokenizer import check_same_tokens, text_config
from engines.jobs.policy.critic_source import critic_source
from engines.jobs.policy.files import (
    initial_source,
    policy_source,
    trained_steps,
    write_hf_files,
)
from engines.jobs.policy.stage import (
    local_reward,
    policy_output,
    policy_tokenizer,
    prompts_within,
    queueing,
    stage_progress,
)
from engines.jobs.policy.teacher_source import teacher_source
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.serving.judges import asked_judges, judge_source, reward_role
from engines.rewards.mixture import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.guards.probe import probe_prompt
from engines.trainers.prompts import PromptSource
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import CompletionScorer
from engines.training.roles import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    TEACHER,
    ModelSource,
    RoleName,
    RoleSpec,
)
from engines.vision.processor import prompt_images
from infra.errors import ConfigError


def rl_round(context: JobContext[RLRoundStageConfig]) -> JobOutput:
    """Generate, score and train for one round."""
    config, spec, rl = context.config, context.spec, context.config.rl
    with ExitStack() as stack:
        with context.clock("load"):
            rewards = stack.enter_context(RewardScorer(local_reward(context, rl.reward)))
            prepare_torch(
                config.hardware,
                config.training.num_threads,
                context.journal.log,
                computes=config.driver_computes,
            )
            dataset = load_dataset(context.input("dataset"))
            rows = dataset.rl_rows()
            check_data_sources(rl.reward, (row.data_source for row in rows))
            roles = _roles(context)
            hf_dir = context.attempt_dir / "hf"
            write_hf_files(roles[POLICY].source.hf_dir, hf_dir, config.model.chat_template)
            tokenizer = policy_tokenizer(hf_dir)
            num_new_tokens = rl.sampling.max_new_tokens
            images = prompt_images(hf_dir, dataset.images_path)
            prompts = prompts_within(
                rows, tokenizer, config.model.max_length, num_new_tokens, images=images
            )
            worker_spec = WorkerSpec(
                roles=roles,
                serving_dir=hf_dir,
                rollout=config.rollout,
                temperature=rl.sampling.temperature,
                platform=config.hardware.platform,
                device_kind=config.hardware.device_kind,
                seed=spec.seed,
            )
            judge = judge_source(
                context,
                rl.reward.judge,
                policy_replica(worker_spec, config.rollout, context.attempt_dir),
                embedded=config.driver_computes,
            )
            workers, rollout, judge_engines = launch_judged_policy(
                worker_spec,
                judge.replica if judge else None,
                context.attempt_dir,
                queueing(context, config.hardware),
            )
            stack.enter_context(closing(workers))
            stack.enter_context(closing(rollout))
            judges = stack.enter_context(
                asked_judges(rl.reward, spec.seed, roles.get(REWARD), workers, judge, judge_engines)
            )
        progress = stage_progress(context, config.checkpoint, rl.num_steps_per_round)
        before = context.optional_input("policy")
        trainer = RLTrainer(
            config,
            workers,
            rollout,
            PromptSource(prompts, config, spec.seed, images),
            CompletionScorer(
                rewards,
                tokenizer,
                rl.algorithm.overlong,
                num_new_tokens,
                judges,
            ),
            progress,
            probe_prompt(hf_dir, config.model.max_length),
            int(text_config(hf_dir)["vocab_size"]),
            trained_steps(before) if before else None,
            context.attempt_dir,
        )
        trainer.run()
        return policy_output(context, progress, hf_dir, trainer.trained_steps())


def _roles(context: JobContext[RLRoundStageConfig]) -> dict[RoleName, RoleSpec]:
    """The policy, and what the recipe asks for beside it: critic, reward, reference, teacher."""
    config, rl = context.config, context.config.rl
    num_steps = config.round * rl.num_steps_per_round
    before = context.optional_input("policy")
    # After a rejected round it may be SFT's policy, whose optimizer is none of RL.
    restore = before is not None and trained_steps(before).stage == "rl_round"
    policy, reference = _sources(context)
    roles: dict[RoleName, RoleSpec] = {
        POLICY: RoleSpec(
            source=policy,
            training=config.training,
            optimizer=rl.optimizer,
            restore_optimizer=restore,
            total_num_steps=num_steps,
        )
    }
    reward = reward_role(context, rl.reward.model, config.training)
    if reward is not None:
        roles[REWARD] = reward
    if rl.critic is not None:
        source = critic_source(
            policy,
            before,
            context.attempt_dir,
            reward.source if reward and rl.critic.start == "reward_model" else None,
        )
        if restore and source.checkpoint_dir is None:
            raise ConfigError(
                "rl.critic",
                f"got a critic in round {config.round}, and a policy whose round had none; need "
                "one from round 1 on; start again from round 1",
            )
        roles[CRITIC] = RoleSpec(
            source=source,
            # An adapter is the policy's: all of a critic is trained.
            training=config.training.model_copy(update={"lora": None}),
            optimizer=rl.critic.optimizer,
            model_type="value_model",
            restore_optimizer=restore,
            total_num_steps=num_steps,
        )
    if reference is not None:
        check_same_tokens(policy.hf_dir, reference.hf_dir)
        roles[REFERENCE] = RoleSpec(source=reference, training=config.training)
    if rl.distillation is not None:
        given, limit = context.optional_input("teacher"), config.model.max_length
        teacher = teacher_source(rl.distillation, given, policy, limit)
        # An adapter is the policy's.
        frozen = config.training.model_copy(update={"lora": None})
        roles[TEACHER] = RoleSpec(teacher, frozen)
    return roles


def _sources(context: JobContext[RLRoundStageConfig]) -> tuple[ModelSource, ModelSource | None]:
    """Weights of the policy, and of the reference where a KL needs one."""
    config, spec = context.config, context.spec
    inputs = spec.inputs

    def initial() -> ModelSource:
        return initial_source(
            config.model,
            context.optional_input("model"),
            context.input("dataset"),
            spec.seed,
            context.attempt_dir,
        )

    start = None if "policy" in inputs else initial()
    policy = start or policy_source(context.input("policy"))
    if not config.rl.algorithm.needs_reference:
        return policy, None
    if "reference" in inputs:
        return policy, policy_source(context.input("reference"))
    return policy, start or initial()


if __name__ == "__main__":
    run_job(RLRoundStageConfig, rl_round)
