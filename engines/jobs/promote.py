"""Job `promote`: decides if the evaluated model may get the alias. Imports no torch.

It only writes the decision; the process that finds it committed registers model and alias.
"""

from pathlib import Path

from engines.config.stages.final import PromoteStageConfig
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.trainers.evaluation.comparison import differences_of, metrics_of, paired_gain
from infra.errors import ConfigError
from infra.tracking.promotion import INCUMBENT, PROMOTION, Comparison, Decision


def promote(context: JobContext[PromoteStageConfig]) -> JobOutput:
    """Compare a metric with its threshold and with the incumbent, and write `decision.json`."""
    gate = context.config.promote
    value = metric_of(context.input("evaluation"), gate.metric)
    reached, comparison = value >= gate.min_value, compare(context)
    reason = f"{gate.metric} {value:.4g}, need >= {gate.min_value:g}"
    if reached:
        reason += f"; {comparison or 'there is no incumbent'}"
    decision = Decision(
        promoted=reached and (comparison is None or comparison.is_beaten),
        metric=gate.metric,
        value=value,
        min_value=gate.min_value,
        model_digest=context.spec.inputs["model"].digest,
        model_name=gate.model_name,
        alias=gate.alias,
        comparison=comparison,
        reason=reason,
    )
    decision.write(context.output_dir)
    verdict = decision.given_alias or "not registered"
    context.journal.progress(1, 1, f"{verdict}: {reason}")
    metrics = {gate.metric: value, "promoted": float(decision.promoted)}
    if comparison is not None:
        metrics |= {
            "incumbent": comparison.value,
            "gain": comparison.gain,
            "gain_margin": comparison.margin,
        }
    return JobOutput(PROMOTION, metrics)


def compare(context: JobContext[PromoteStageConfig]) -> Comparison | None:
    """Compare with the incumbent; None without one, `ConfigError` without a common problem."""
    gate = context.config.promote
    theirs = context.optional_input("incumbent_evaluation")
    if theirs is None:
        return None
    differences = differences_of(context.input("evaluation"), theirs, gate.metric)
    if not differences:
        raise ConfigError(
            "promote.metric", f"got {gate.metric!r}; need one that both models have on some problem"
        )
    gain = paired_gain(differences, gate.confidence, context.spec.seed)
    return Comparison(
        incumbent_digest=context.spec.inputs[INCUMBENT].digest,
        value=metric_of(theirs, gate.metric),
        gain=gain.mean,
        margin=gain.margin,
        confidence=gate.confidence,
        num_problems=gain.num_problems,
    )


def metric_of(evaluation: Path, metric: str) -> float:
    """Return the deciding metric of an evaluation; `ConfigError` if the evaluation lacks it."""
    metrics = metrics_of(evaluation)
    if metric not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError("promote.metric", f"got {metric!r}; need one of: {known}")
    return metrics[metric]


if __name__ == "__main__":
    run_job(PromoteStageConfig, promote)
