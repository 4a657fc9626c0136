"""Job `promote`: whether the evaluated model may bear the alias. Imports no torch.

The decision is data; who sees it committed registers the model and moves the alias.
"""

import json

from engines.config.stages import PromoteStageConfig
from engines.jobs.runtime import JobContext, JobOutput, run_job
from infra.errors import ConfigError
from infra.tracking.promotion import PROMOTION, Decision


def promote(context: JobContext[PromoteStageConfig]) -> JobOutput:
    """Compare the asked metric with its bar and write `decision.json`.

    Args:
        context: of the job.

    Returns:
        A `promotion`.

    Raises:
        ConfigError: the evaluation has no metric of that name.
    """
    gate = context.config.promote
    summary = json.loads((context.input("evaluation") / "summary.json").read_text(encoding="utf-8"))
    metrics = summary["metrics"]
    value = metrics.get(gate.metric)
    if value is None:
        known = ", ".join(sorted(metrics))
        raise ConfigError("promote.metric", f"got {gate.metric!r}; need one of: {known}")
    promoted = value >= gate.min_value
    Decision(
        promoted=promoted,
        metric=gate.metric,
        value=value,
        min_value=gate.min_value,
        model_digest=context.spec.inputs["model"].digest,
        model_name=gate.model_name,
        alias=gate.alias,
    ).write(context.output_dir)
    verdict = "promoted" if promoted else "not promoted"
    context.journal.progress(
        1, 1, f"{verdict}: {gate.metric} {value:g}, need >= {gate.min_value:g}"
    )
    return JobOutput(PROMOTION, {gate.metric: value, "promoted": float(promoted)})


if __name__ == "__main__":
    run_job(PromoteStageConfig, promote)
