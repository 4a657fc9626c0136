"""Job `compare`: compares two models on the same problems. Imports no torch."""

import json

from engines.config.stages.final import CompareStageConfig
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.trainers.evaluation.comparison import (
    compared_metrics,
    comparison_json,
    comparison_metrics,
    metric_gain,
)


def compare(context: JobContext[CompareStageConfig]) -> JobOutput:
    """Write gain and confidence margin of all metrics that both evaluations have."""
    ours, theirs = context.input("evaluation"), context.input("against")
    confidence, seed = context.config.confidence, context.spec.seed
    found = (metric_gain(ours, theirs, m, confidence, seed) for m in compared_metrics(ours, theirs))
    gains = [gain for gain in found if gain is not None]
    text = json.dumps(comparison_json(gains, context.config.confidence), indent=2, sort_keys=True)
    (context.output_dir / "comparison.json").write_text(f"{text}\n", encoding="utf-8", newline="")
    context.journal.progress(1, 1, "; ".join(map(str, gains)))
    return JobOutput("comparison", comparison_metrics(gains))


if __name__ == "__main__":
    run_job(CompareStageConfig, compare)
