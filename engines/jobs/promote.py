"""Job `promote`: whether the evaluated model may bear the alias. Imports no torch.

The decision is data; registering the model and moving the alias is the task's work.
"""

import json

from engines.config.stages import PromoteStageConfig
from engines.jobs.runtime import JobContext, JobOutput, run_job
from infra.errors import ConfigError
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import canonical_json

DECISION_NAME = "decision.json"


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
    decision = {
        "promoted": promoted,
        "metric": gate.metric,
        "value": value,
        "min_value": gate.min_value,
        "model_digest": context.spec.inputs["model"].digest,
    }
    atomic_write_bytes(context.output_dir / DECISION_NAME, canonical_json(decision))
    verdict = "promoted" if promoted else "not promoted"
    context.journal.progress(
        1, 1, f"{verdict}: {gate.metric} {value:g}, need >= {gate.min_value:g}"
    )
    return JobOutput("promotion", {gate.metric: value, "promoted": float(promoted)})


if __name__ == "__main__":
    run_job(PromoteStageConfig, promote)
