"""Job `soup`: averages the weights of several models."""

from engines.checkpoint.export import write_model
from engines.checkpoint.soup import mean_tensors
from engines.config.stages.final import SoupStageConfig
from engines.config.training import HardwareConfig
from engines.jobs.process.policy import write_hf_files
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch


def soup(context: JobContext[SoupStageConfig]) -> JobOutput:
    """Average the weights of the input models."""
    config = context.config
    # Without a device, so that the result is the same on every machine.
    prepare_torch(HardwareConfig(platform="cpu"), 1, context.journal.log)
    models = [context.input(config.input_name(place)) for place in range(config.num_models)]
    hf_dir = context.attempt_dir / "hf"
    write_hf_files(models[0], hf_dir, None)
    context.heartbeat.enter("merge", DEADLINES_S["merge"])
    with context.clock("save"):
        write_model(
            mean_tensors(models), hf_dir, context.output_dir, config.dtype, config.max_shard_bytes
        )
    return JobOutput("model", {"num_models": float(config.num_models)})


if __name__ == "__main__":
    run_job(SoupStageConfig, soup)
