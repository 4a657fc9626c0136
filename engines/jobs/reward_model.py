"""Job `reward_model`: trains a sequence classification model with one output on pairs.

It starts from a policy's weights if one is given, with a head of zeros. The head's bias stays 0:
comparisons do not depend on it, and transformers' models have none.
"""

from contextlib import ExitStack

from engines.algorithms.parts import options_as
from engines.algorithms.preference.options import RewardModelOptions
from engines.checkpoint.score_model import BIAS, write_score_config, write_score_model
from engines.config.options import own_options
from engines.config.rows import BRADLEY_TERRY
from engines.config.stages.supervised import RewardModelStageConfig
from engines.data.read.examples import as_reward_model, read_pairs
from engines.jobs.process.exported_policy import exported_policy
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.supervised_stage import start_of, train, training_pairs
from engines.trainers.supervised.preference import RewardPairs
from engines.training.backends.merging import checkpoint_weights
from engines.training.spec import REWARD, RoleSpec, role_checkpoint

KIND = "reward_model"


def reward_model(context: JobContext[RewardModelStageConfig]) -> JobOutput:
    """Train a reward model on preference pairs."""
    config, section = context.config, context.config.reward_model
    config_dir = context.attempt_dir / KIND
    with ExitStack() as stack:
        with context.clock("load"):
            start = start_of(context)
            tokenizer, limit = start.tokenizer, config.model.max_length
            held_out = start.dataset.preference_evaluation_rows()
            pairs = read_pairs(training_pairs(start), tokenizer, limit, as_reward_model)
            options = own_options(section.options, BRADLEY_TERRY, "reward_model.options")
            rows = RewardPairs(
                section,
                options_as(RewardModelOptions, options),
                pairs,
                read_pairs(held_out, tokenizer, limit, as_reward_model),
            )
            last = {side.input_ids[-1] for p in pairs for side in (p.chosen, p.rejected)}
            write_score_config(start.hf_dir, last, config_dir)
            before, source = context.optional_input("policy"), start.source
            if before is not None:
                source = exported_policy(
                    before, context.attempt_dir / "initial_reward_model", config.max_shard_bytes
                )
            frozen = (*config.training.frozen_parameters, BIAS)
            role = RoleSpec(
                source=source,
                training=config.training.model_copy(update={"frozen_parameters": frozen}),
                optimizer=section.optimizer,
                model_type="value_model",
                total_num_steps=section.num_steps,
            )
        progress, trained = train(
            context, stack, section, section.batch_size_pairs, rows, start, {REWARD: role}
        )
        with context.clock("save"):
            checkpoint = role_checkpoint(progress.last_checkpoint(), REWARD)
            write_score_model(
                checkpoint_weights(checkpoint, config_dir),
                config_dir,
                context.output_dir,
                "float32",
                config.max_shard_bytes,
            )
        return JobOutput(KIND, {"num_steps": float(trained.num_steps), **trained.metrics})


if __name__ == "__main__":
    run_job(RewardModelStageConfig, reward_model)
