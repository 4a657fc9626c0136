"""Job `reward_model`: trains a sequence classification model with one output on pairs.

It starts from a policy's weights if one is given, with a head of zeros. The head's bias stays 0:
comparisons do not depend on it, and transformers' models have none.
"""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from engines.algorithms.parts import options_as
from engines.algorithms.preference.options import RewardModelOptions
from engines.checkpoint.score_model import BIAS, write_score_config, write_score_model
from engines.config.options import own_options
from engines.config.rows import BRADLEY_TERRY
from engines.config.stages.supervised import RewardModelStageConfig
from engines.data.read.pairs import Pairs, as_reward_model, read_pairs
from engines.data.read.rows import PreferenceRow
from engines.jobs.policy.stage import stage_progress
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import Start, launched, start_of, training_pairs
from engines.trainers.progress import StageProgress
from engines.trainers.supervised.preference import RewardPairs
from engines.trainers.supervised.trainer import SupervisedTrainer
from engines.training.backends.merging import checkpoint_weights, merge_checkpoint
from engines.training.spec import REWARD, ModelSource, RoleSpec, role_checkpoint

KIND = "reward_model"


def reward_model(context: JobContext[RewardModelStageConfig]) -> JobOutput:
    """Train a reward model on preference pairs."""
    config, section = context.config, context.config.reward_model
    config_dir = context.attempt_dir / KIND
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            pairs = _pairs(context, start, training_pairs(start))
            held_out = _pairs(context, start, start.dataset.preference_evaluation_rows())
            options = own_options(section.options, BRADLEY_TERRY, "reward_model.options")
            training_set = RewardPairs(
                section, options_as(RewardModelOptions, options), pairs, held_out
            )
            last = {side.input_ids[-1] for p in pairs for side in (p.chosen, p.rejected)}
            write_score_config(start.hf_dir, last, config_dir)
            frozen = (*config.training.frozen_parameters, BIAS)
            role = RoleSpec(
                source=_first_weights(context, start),
                training=config.training.model_copy(update={"frozen_parameters": frozen}),
                optimizer=section.optimizer,
                model_type="value_model",
                total_num_steps=section.num_steps,
            )
            workers = launched(context, stack, start.hf_dir, {REWARD: role}, training_set)
        progress = stage_progress(context, config.checkpoint, section.num_steps)
        trained = SupervisedTrainer(
            section,
            training_set,
            section.batch_size_pairs,
            workers,
            progress,
            context.spec.seed,
            KIND,
        ).train()
        _write(context, progress, config_dir)
        return JobOutput(KIND, {"num_steps": float(trained.num_steps), **trained.metrics})


def _pairs(
    context: JobContext[RewardModelStageConfig], start: Start, rows: Iterable[PreferenceRow]
) -> Pairs:
    """Tokenize rows as the model reads them."""
    max_length = context.config.model.max_length
    return read_pairs(rows, start.tokenizer, max_length, as_reward_model)


def _first_weights(context: JobContext[RewardModelStageConfig], start: Start) -> ModelSource:
    """Return the first weights; a policy's checkpoint, of any layout, is exported once."""
    before = context.optional_input("policy")
    if before is None:
        return start.source
    made: Path = context.attempt_dir / "initial_reward_model"
    shutil.rmtree(made, ignore_errors=True)
    merge_checkpoint(before, made, "float32", context.config.max_shard_bytes)
    return ModelSource(made)


def _write(
    context: JobContext[RewardModelStageConfig], progress: StageProgress, config_dir: Path
) -> None:
    with context.clock("save"):
        checkpoint = role_checkpoint(progress.last_checkpoint(), REWARD)
        write_score_model(
            checkpoint_weights(checkpoint, config_dir),
            config_dir,
            context.output_dir,
            "float32",
            context.config.max_shard_bytes,
        )


if __name__ == "__main__":
    run_job(RewardModelStageConfig, reward_model)
