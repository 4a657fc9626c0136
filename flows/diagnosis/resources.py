"""Findings about memory, disk space and processes of a stage."""

from engines.config.diagnosis import DiagnosisConfig
from flows.diagnosis.findings import Evidence, Finding, StageView, compared, points, windows
from tasks.runner.memory_knobs import memory_knobs

PEAK_MEMORY = "perf/max_memory_allocated_gb"
RESTARTS = "rollout/num_restarts"
NEXT = {
    "disk_full": (
        "free space there; the same command resumes",
        "location.store or location.home on a larger disk",
        "checkpoint.num_keep and checkpoint.every_num_steps",
        "`rlhf gc` shows what can be removed",
    ),
    "dead_rank": (
        "the end of that rank's log, in the error",
        "memory: a process that is killed without a word was often the largest of its machine",
        "the same command resumes from the newest step checkpoint",
    ),
    "hang": (
        "the stacks of all threads and ranks, which the error names",
        "progress_deadlines_s, if it was only slow",
        "training.collective_timeout_s, so that the rank that waits says so",
    ),
    "non_finite": (
        "look at the named rows",
        "a lower learning rate",
        "training.dtype float32",
    ),
}
"""Advice by cause of a failure; for out of memory it depends on the stage."""
ANY_NEXT = ("the error and the end of the job's log", "the same command resumes")


def failure(stage: StageView) -> Finding | None:
    """Return why a stage ended without a commit; None if it is committed or running."""
    at = tuple(Evidence(PEAK_MEMORY, value, step) for step, value in _memory(stage)[-1:])
    if stage.problem is None:
        if not stage.is_gone:
            return None
        text = (
            f"its process ended without a word in phase {stage.phase}"
            f"{f' after step {stage.last_step}' if stage.last_step is not None else ''}: it was "
            "killed, by a person or for the memory of its machine"
        )
        knobs = memory_knobs(stage.config, stage.phase)
        then = ("the kernel's log of that machine", *knobs, ANY_NEXT[-1])
        return Finding("resources", "killed", stage.label, text, at, then, "failed")
    cause = stage.problem.cause
    then = NEXT.get(cause, ANY_NEXT)
    if cause == "out_of_memory":
        then = (*memory_knobs(stage.config, stage.problem.phase), ANY_NEXT[-1])
    area = "algorithm" if cause == "non_finite" else "resources"
    text = stage.problem.message.splitlines()[0] if stage.problem.message else stage.problem.type
    return Finding(area, cause or "failed", stage.label, text, at, tuple(then), "failed")


def resource_findings(stage: StageView, thresholds: DiagnosisConfig) -> list[Finding]:
    """Return the stage's failure, growth of its memory and lost replicas."""
    found = [each for each in (failure(stage), _growth(stage, thresholds)) if each is not None]
    _, restarts = points([stage], RESTARTS)
    if restarts and restarts[-1][1]:
        step = next(step for step, value in restarts if value)
        text = f"{restarts[-1][1]:.0f} rollout engines were lost and started again"
        then = ("their logs", "rollout.silence_s, if they were only slow")
        evidence = (Evidence(RESTARTS, restarts[-1][1], step),)
        found.append(Finding("resources", "replica_lost", stage.label, text, evidence, then))
    return found


def _growth(stage: StageView, thresholds: DiagnosisConfig) -> Finding | None:
    means = windows(_memory(stage), thresholds.window_num_steps)
    if len(means) < 2 or means[-1] < thresholds.memory_growth * means[0]:
        return None
    return Finding(
        "resources",
        "memory_growth",
        stage.label,
        f"peak memory grew from {means[0]:.3g} GB to {means[-1]:.3g} GB",
        (compared([stage], PEAK_MEMORY, thresholds.window_num_steps),),
        (*memory_knobs(stage.config), "longer answers, or something that is never given back"),
    )


def _memory(stage: StageView) -> list[tuple[int, float]]:
    return list(points([stage], PEAK_MEMORY)[1])
