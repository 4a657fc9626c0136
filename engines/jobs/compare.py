"""Job `compare`: is one model better than another on the same problems? Imports no torch."""

import json

from engines.config.stages.final import CompareStageConfig
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.trainers.evaluation.comparison import (
    compared_metrics,
    comparison_json,
    comparison_metrics,
    metric_gain,
)

COMPARISON = "comparison"
COMPARISON_NAME = "comparison.json"


def compare(context: JobContext[CompareStageConfig]) -> JobOutput:
    """Compare every metric that some problem has in both evaluations; write `comparison.json`.

    Args:
        context: of the job.

    Returns:
        A `comparison`; of each metric the gain, the margin of chance and which way is better.

    Raises:
        ConfigError: the evaluations are of other problems.
    """
    ours, theirs = context.input("evaluation"), context.input("against")
    found = [
        metric_gain(ours, theirs, metric, context.config.confidence, context.spec.seed)
        for metric in compared_metrics(ours, theirs)
    ]
    gains = [gain for gain in found if gain is not None]
    text = json.dumps(comparison_json(gains, context.config.confidence), indent=2, sort_keys=True)
    (context.output_dir / COMPARISON_NAME).write_text(f"{text}\n", encoding="utf-8", newline="")
    context.journal.progress(1, 1, "; ".join(map(str, gains)))
    return JobOutput(COMPARISON, comparison_metrics(gains))


if __name__ == "__main__":
    run_job(CompareStageConfig, compare)
