"""The interface that runs stages (`StageRunner`), and the result of a stage."""

from collections.abc import Mapping
from typing import Protocol

from engines.config.stages.base import StageConfig
from infra.frozen_model import FrozenModel
from infra.store.stage_spec import Adoption, Artifact
from infra.tracking.comparison import BEFORE, GAIN, MARGIN, PAIR_ACCURACY, verdicts
from tasks.runner.identity import StageRequest, stage_request

COUNT_METRICS = ("num_rows", "num_rl", "num_sft", "num_eval", "num_steps", "size_bytes")


def headline_metric(metrics: Mapping[str, float]) -> str:
    """Return a stage's most important metrics as short text; empty if it has none."""
    if "promoted" in metrics:
        verdict = "promoted" if metrics["promoted"] else "not promoted"
        if "gain" not in metrics:
            return verdict
        return f"{verdict}, gain {metrics['gain']:+.3g}, chance {metrics['gain_margin']:.3g}"
    if found := verdicts(metrics):
        metric = "accuracy" if "accuracy" in found else next(iter(found))
        gain, margin = metrics[GAIN + metric], metrics[MARGIN + metric]
        return f"{metric} {gain:+.3g}, chance {margin:.3g}: {found[metric]}"
    if "accuracy" in metrics:
        return f"accuracy {metrics['accuracy']:.1%}"
    if PAIR_ACCURACY in metrics:
        start = metrics.get(BEFORE + PAIR_ACCURACY)
        was = f"{start:.1%} -> " if start is not None else ""
        return f"pair accuracy {was}{metrics[PAIR_ACCURACY]:.1%}"
    return next((f"{name} {metrics[name]:,.0f}" for name in COUNT_METRICS if metrics.get(name)), "")


class StageResult(FrozenModel):
    """Result of a finished stage."""

    label: str
    """Name of the stage within the run (`rl_round_2`)."""
    fingerprint: str
    artifact: Artifact
    reused: bool
    """True if the output existed before this run requested it."""
    wall_s: float
    """Seconds that this run spent on the stage, including the lookup."""
    metrics: dict[str, float]
    """Headline metrics from the commit record."""
    adopted: Adoption | None = None
    """Half-trained work of another fingerprint that the result continues."""
    job_seconds: dict[str, float]
    """Wall seconds of the job's phases, from the commit record."""

    @property
    def digest(self) -> str:
        """Digest of the output artifact."""
        return self.artifact.digest


class StageRunner(Protocol):
    """Runs stages, or only plans them."""

    @property
    def seed(self) -> int:
        """Seed of the run, from which all randomness of every stage derives."""
        ...

    def run(self, request: StageRequest) -> StageResult:
        """Run one stage, or return its existing result."""
        ...


def run_stage(
    run: StageRunner,
    config: StageConfig,
    then: StageRequest | None = None,
    /,
    **given: Artifact | None,
) -> StageResult:
    """Run one stage with those of the given artifacts that it reads.

    Args:
        then: a stage that only waits for this one's output; the same job process runs it next.

    Raises:
        ValueError: an artifact is missing that the stage needs.
    """
    request = stage_request(config, run.seed, then, **given)
    absent = [name for name in config.needs if name not in request.given]
    if absent:
        raise ValueError(f"stage {config.label}: got {sorted(given)}; need {', '.join(absent)}")
    return run.run(request)
