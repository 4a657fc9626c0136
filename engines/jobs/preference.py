"""Job `preference`: trains a policy with a loss over pairs (DPO and related losses).

With the input `pairs`, from self-play, it trains on them instead of the dataset's pairs. The
reference is the policy that the stage starts with, loaded only if the loss needs it; with an
adapter it is the policy without the adapter.
"""

from contextlib import ExitStack
from pathlib import Path

from engines.config.stages.supervised import PreferenceStageConfig
from engines.data.read.dataset import PREFERENCE_FILE
from engines.data.read.pairs import as_policy, read_pairs
from engines.data.read.row_files import PREFERENCE_FORMAT, RowFile
from engines.jobs.policy.stage import policy_output, stage_progress
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import Start, launched, start_of, training_pairs
from engines.trainers.progress import TrainedSteps
from engines.trainers.supervised.preference import PolicyPairs
from engines.trainers.supervised.trainer import SupervisedTrainer
from engines.training.spec import POLICY, REFERENCE, RoleName, RoleSpec


def preference(context: JobContext[PreferenceStageConfig]) -> JobOutput:
    """Train the policy on preference pairs."""
    config, section = context.config, context.config.preference
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            pairs = training_set(config, start, context.optional_input("pairs"))
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
            workers = launched(context, stack, start.hf_dir, roles, pairs)
        progress = stage_progress(context, config.checkpoint, section.num_steps)
        trained = SupervisedTrainer(
            section,
            pairs,
            section.batch_size_pairs,
            workers,
            progress,
            context.spec.seed,
            "preference",
        ).train()
        steps = TrainedSteps(stage="preference", num_steps=trained.num_steps)
        return policy_output(context, progress, start.hf_dir, steps, trained.metrics)


def training_set(
    config: PreferenceStageConfig, start: Start, made: Path | None = None
) -> PolicyPairs:
    """Tokenize the training pairs (`made` by self-play, else the data's) and the held-out pairs."""
    limit, held_out = config.model.max_length, start.dataset.preference_evaluation_rows()
    pairs = (
        training_pairs(start)
        if made is None
        else RowFile(made / PREFERENCE_FILE, PREFERENCE_FORMAT)
    )
    return PolicyPairs(
        config.preference,
        read_pairs(pairs, start.tokenizer, limit, as_policy),
        read_pairs(held_out, start.tokenizer, limit, as_policy),
        limit,
    )


if __name__ == "__main__":
    run_job(PreferenceStageConfig, preference)
