"""Job `preference`: trains a policy on pairs of answers (DPO and related losses).

With the input `pairs`, from self-play, it trains on them instead of the dataset's pairs. The
reference is the policy that the stage starts with, loaded only if the loss needs it; with an
adapter it is the policy without the new adapter.
"""

from pathlib import Path

from engines.config.stages.supervised import PreferenceStageConfig
from engines.data.read.dataset import PREFERENCE_FILE
from engines.data.read.examples import as_policy, read_pairs
from engines.data.read.row_files import PREFERENCE_FORMAT, RowFile
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import Start, train_policy, training_pairs
from engines.trainers.supervised.preference import PolicyPairs


def preference(context: JobContext[PreferenceStageConfig]) -> JobOutput:
    """Train the policy on preference pairs."""
    config = context.config

    def pairs(start: Start) -> PolicyPairs:
        return training_set(config, start, context.optional_input("pairs"))

    section = config.preference
    return train_policy(
        context, section, section.batch_size_pairs, pairs, lambda rows: rows.needs_reference
    )


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
