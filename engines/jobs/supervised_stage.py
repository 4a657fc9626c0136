"""Shared parts of the jobs that train on given answers: start, training, and the whole job."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engines.config.sections import SupervisedConfig
from engines.config.stages.base import TrainingStageConfig
from engines.controller.launch import launch_policy_group
from engines.controller.model_worker import WorkerSpec
from engines.data.read.dataset import Dataset, load_dataset
from engines.data.read.row_files import RowFile
from engines.data.read.rows import PreferenceRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.jobs.process.policy import HF_DIR, initial_source, policy_source, write_hf_files
from engines.jobs.process.policy_stage import (
    policy_output,
    policy_tokenizer,
    queueing,
    stage_progress,
)
from engines.jobs.process.runtime import JobContext, JobOutput
from engines.jobs.process.torch_setup import prepare_torch
from engines.trainers.progress import StageProgress
from engines.trainers.supervised.trainer import SupervisedTrainer, Trained
from engines.trainers.supervised.training_set import TrainingSet
from engines.trainers.trained_steps import TrainedSteps
from engines.training.spec import POLICY, REFERENCE, ModelSource, RoleName, RoleSpec
from infra.errors import ConfigError

Rows = TypeVar("Rows", bound=TrainingSet)


@dataclass(frozen=True)
class Start:
    """Data, weights and tokenizer that a supervised stage starts from.

    Attributes:
        source: weights of the input policy, or of the pipeline's model.
        hf_dir: configuration and tokenizer in the attempt's directory.
        tokenizer: tokenizer of the model, with the recipe's chat template.
    """

    dataset: Dataset
    source: ModelSource
    hf_dir: Path
    tokenizer: ChatTokenizer


def start_of(context: JobContext[TrainingStageConfig]) -> Start:
    """Set up torch and find data and weights; starts no rank."""
    config = context.config
    prepare_torch(
        config.hardware,
        config.training.num_threads,
        context.journal.log,
        computes=config.training.num_workers == 1,
        trains_with=config.training.backend,
    )
    dataset = load_dataset(context.input("dataset"))
    before = context.optional_input("policy")
    source = (
        policy_source(before)
        if before is not None
        else initial_source(
            config.model,
            context.optional_input("model"),
            dataset.directory,
            context.spec.seed,
            context.attempt_dir,
        )
    )
    hf_dir = context.attempt_dir / HF_DIR
    write_hf_files(source.hf_dir, hf_dir, config.model.chat_template)
    return Start(dataset, source, hf_dir, policy_tokenizer(hf_dir))


def training_pairs(start: Start) -> RowFile[PreferenceRow]:
    """Return the pairs to train on; raise ConfigError if there are none."""
    rows = start.dataset.preference_rows()
    if not rows:
        raise ConfigError("data.preference", "got 0 pairs; the stage trains on them; add a source")
    return rows


def train_policy(
    context: JobContext[TrainingStageConfig],
    section: SupervisedConfig,
    rows_per_step: int,
    training_set: Callable[[Start], Rows],
    needs_reference: Callable[[Rows], bool] = lambda _: False,
) -> JobOutput:
    """Run the whole job of a stage that trains a policy.

    Args:
        rows_per_step: rows of one optimizer step, over all ranks.
        needs_reference: True if training reads the policy that the stage starts with.
    """
    config = context.config
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            rows = training_set(start)
            roles: dict[RoleName, RoleSpec] = {
                POLICY: RoleSpec(
                    source=start.source,
                    training=config.training,
                    optimizer=section.optimizer,
                    total_num_steps=section.num_steps,
                )
            }
            if needs_reference(rows):
                roles[REFERENCE] = RoleSpec(source=start.source, training=config.training)
        progress, trained = train(context, stack, section, rows_per_step, rows, start, roles)
        return policy_output(
            context,
            progress,
            start.hf_dir,
            TrainedSteps(stage=config.stage, num_steps=trained.num_steps),
            trained.metrics,
        )


def train(
    context: JobContext[TrainingStageConfig],
    stack: ExitStack,
    section: SupervisedConfig,
    rows_per_step: int,
    training_set: TrainingSet,
    start: Start,
    roles: Mapping[RoleName, RoleSpec],
) -> tuple[StageProgress, Trained]:
    """Start ranks with `roles`, which `stack` closes, and train on all steps.

    Raise ConfigError if the largest unit of `training_set` does not fit into a micro-batch.
    """
    config, seed = context.config, context.spec.seed
    with context.clock("load"):
        config.training.check_unit(training_set.largest_unit, "the longest conversation or pair")
        spec = WorkerSpec(
            roles=roles,
            serving_dir=start.hf_dir,
            rollout=None,
            temperature=1.0,
            platform=config.hardware.platform,
            device_kind=config.hardware.device_kind,
            seed=seed,
        )
        workers = stack.enter_context(
            closing(
                launch_policy_group(spec, context.attempt_dir, queueing(context, config.hardware))
            )
        )
    progress = stage_progress(context, config.checkpoint, section.num_steps)
    return progress, SupervisedTrainer(
        section, training_set, rows_per_step, workers, progress, seed, config.stage
    ).train()
