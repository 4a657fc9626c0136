"""Job `preference`: dataset and policy to a policy, by a loss over pairs (DPO and its family).

The reference is the policy that the stage starts with, and is loaded only for a loss that reads
it; under an adapter it is the policy without it.
"""

from contextlib import ExitStack

from engines.config.stages.supervised import PreferenceStageConfig
from engines.data.read.pairs import as_policy, read_pairs
from engines.jobs.policy.stage import policy_output, stage_progress
from engines.jobs.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import Start, launched, start_of, training_pairs
from engines.trainers.supervised.preference import PolicyPairs
from engines.trainers.supervised.trainer import SupervisedTrainer
from engines.trainers.trained_steps import TrainedSteps
from engines.training.roles import POLICY, REFERENCE, RoleName, RoleSpec


def preference(context: JobContext[PreferenceStageConfig]) -> JobOutput:
    """Train the policy on the preference rows."""
    config, section = context.config, context.config.preference
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            pairs = training_set(config, start)
            roles: dict[RoleName, RoleSpec] = {
                POLICY: RoleSpec(
                    source=start.source,
                    training=config.training,
                    optimizer=section.optimizer,
                    total_num_steps=section.num_steps,
                )
            }
            if pairs.needs_reference:
                roles[REFERENCE] = RoleSpec(source=start.source, training=config.training)
            workers = launched(context, stack, start.hf_dir, roles)
        progress = stage_progress(context, config.checkpoint, section.num_steps)
        trained = SupervisedTrainer(
            section,
            pairs,
            section.batch_size_pairs,
            workers,
            progress,
            context.spec.seed,
            "preference",
        ).run()
        steps = TrainedSteps(stage="preference", num_steps=trained.num_steps)
        return policy_output(context, progress, start.hf_dir, steps, trained.after)


def training_set(config: PreferenceStageConfig, start: Start) -> PolicyPairs:
    """The pairs of the data, tokenized."""
    limit, held_out = config.model.max_length, start.dataset.preference_evaluation_rows()
    return PolicyPairs(
        config.preference,
        read_pairs(training_pairs(start), start.tokenizer, limit, as_policy),
        read_pairs(held_out, start.tokenizer, limit, as_policy),
        limit,
    )


if __name__ == "__main__":
    run_job(PreferenceStageConfig, preference)
