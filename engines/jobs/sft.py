"""Job `sft`: trains a policy by supervised fine-tuning."""

from engines.config.stages.supervised import SFTStageConfig
from engines.data.read.examples import sft_examples
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import Start, train_policy
from engines.trainers.supervised.training_set import Conversations


def sft(context: JobContext[SFTStageConfig]) -> JobOutput:
    """Train the model on the supervised rows."""
    section, limit = context.config.sft, context.config.model.max_length

    def conversations(start: Start) -> Conversations:
        return Conversations(sft_examples(start.dataset.sft_rows(), start.tokenizer, limit))

    return train_policy(context, section, section.batch_size_sequences, conversations)


if __name__ == "__main__":
    run_job(SFTStageConfig, sft)
