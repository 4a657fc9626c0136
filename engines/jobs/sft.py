"""Job `sft`: dataset and model to a policy, by supervised fine-tuning."""

from contextlib import ExitStack, closing

from engines.config.stages import SFTStageConfig
from engines.controller.launch import launch_policy_group
from engines.controller.model_worker import WorkerSpec
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import sft_examples
from engines.jobs.policy_files import initial_source, write_hf_files
from engines.jobs.policy_stage import policy_output, policy_tokenizer, queueing, stage_progress
from engines.jobs.runtime import JobContext, JobOutput, run_job
from engines.jobs.torch_setup import prepare_torch
from engines.trainers.supervised import SupervisedTrainer
from engines.trainers.trained_steps import TrainedSteps
from engines.training.roles import POLICY, RoleSpec


def sft(context: JobContext[SFTStageConfig]) -> JobOutput:
    """Train the model on the supervised rows."""
    config, spec = context.config, context.spec
    with ExitStack() as stack:
        with context.clock("load"):
            prepare_torch(
                config.hardware,
                config.training.num_threads,
                context.journal.log,
                computes=config.training.num_workers == 1,
            )
            dataset = load_dataset(context.input("dataset"))
            source = initial_source(
                config.model,
                context.optional_input("model"),
                dataset.directory,
                spec.seed,
                context.attempt_dir,
            )
            hf_dir = context.attempt_dir / "hf"
            write_hf_files(source.hf_dir, hf_dir, config.model.chat_template)
            tokenizer = policy_tokenizer(hf_dir)
            examples = sft_examples(dataset.sft_rows(), tokenizer, config.model.max_length)
            workers = stack.enter_context(
                closing(
                    launch_policy_group(
                        WorkerSpec(
                            roles={
                                POLICY: RoleSpec(
                                    source=source,
                                    training=config.training,
                                    optimizer=config.sft.optimizer,
                                    total_num_steps=config.sft.num_steps,
                                )
                            },
                            serving_dir=hf_dir,
                            rollout=None,
                            temperature=1.0,
                            platform=config.hardware.platform,
                            device_kind=config.hardware.device_kind,
                            seed=spec.seed,
                        ),
                        context.attempt_dir,
                        queueing(context, config.hardware),
                    )
                )
            )
        progress = stage_progress(context, config.checkpoint, config.sft.num_steps)
        trainer = SupervisedTrainer(config.sft, workers, examples, progress, spec.seed)
        return policy_output(
            context, progress, hf_dir, TrainedSteps(stage="sft", num_steps=trainer.run())
        )


if __name__ == "__main__":
    run_job(SFTStageConfig, sft)
