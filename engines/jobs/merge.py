"""Job `merge`: converts a sharded policy checkpoint into a Hugging Face directory."""

from engines.checkpoint.engine_state import read_scalars
from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.config.stages.final import MergeStageConfig
from engines.config.training import HardwareConfig
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch
from engines.training.backends.merging import extract_adapter, merge_checkpoint
from infra.errors import ConfigError


def merge(context: JobContext[MergeStageConfig]) -> JobOutput:
    """Write the policy's weights, or only its adapter, as safetensors with configuration."""
    config = context.config
    # Without a device, so that the result is the same on every machine.
    prepare_torch(HardwareConfig(platform="cpu"), 1, context.journal.log)
    policy_dir = context.input("policy")
    written_by = read_scalars(policy_dir / CHECKPOINT_DIR).backend
    if written_by != config.backend:
        raise ConfigError("backend", f"got {config.backend!r}; need the policy's, {written_by!r}")
    context.heartbeat.enter("merge", DEADLINES_S["merge"])
    with context.clock("save"):
        if config.adapter_only:
            extract_adapter(policy_dir, context.output_dir, config.dtype)
        else:
            merge_checkpoint(policy_dir, context.output_dir, config.dtype, config.max_shard_bytes)
    size_bytes = sum(path.stat().st_size for path in context.output_dir.rglob("*.safetensors"))
    context.journal.progress(1, 1, f"{size_bytes / 1e6:.1f} MB of {config.dtype} weights")
    return JobOutput("model", {"size_bytes": float(size_bytes)})


if __name__ == "__main__":
    run_job(MergeStageConfig, merge)
