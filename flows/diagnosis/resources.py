"""Findings about memory, disk space and processes of a stage.

Findings about the time of steps: dominant phase, weight sync, waiting.
"""

from collections.abc import Mapping
from math import isfinite
from statistics import median

from engines.config.recipe import DiagnosisConfig
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


STEP, SYNC, PREFIX = "timing_s/step", "timing_s/update_weights", "timing_s/"
NEXT_FOR_COMMUNICATION = {
    "gen": (
        "rollout.max_num_sequences, if memory allows more",
        "rollout.engine vllm or sglang",
        "rollout.num_replicas",
        "rl.sampling.max_new_tokens",
    ),
    "update_actor": ("training.max_tokens_per_micro_batch", "training.num_workers"),
    "old_log_prob": ("training.max_tokens_per_micro_batch", "training.num_workers"),
    "ref": ("training.max_tokens_per_micro_batch", "training.num_workers"),
    "reward": ("rl.reward.num_workers", "rl.reward.timeout_s"),
    "update_weights": ("rollout.transport", "rollout.lora_sync", "rollout.placement"),
}
"""Advice that shortens a phase, by phase."""


def step_times(stage: StageView) -> dict[str, float]:
    """Return the seconds of each phase in the median step, longest first; `other` is the rest.

    Empty if no step was timed, or steps have no phases.
    """
    timed = [_times(found) for found in stage.steps.values()]
    steps = [found for found in timed if STEP in found]
    names = {name for found in steps for name in found} - {STEP}
    if not names:
        return {}
    phases = {
        name.removeprefix(PREFIX): median(found.get(name, 0.0) for found in steps) for name in names
    }
    rest = median(2 * found[STEP] - sum(found.values()) for found in steps)
    phases["other"] = max(0.0, rest)
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def _times(found: Mapping[str, float]) -> dict[str, float]:
    return {n: value for n, value in found.items() if n.startswith(PREFIX) and isfinite(value)}


def time_findings(stage: StageView, thresholds: DiagnosisConfig) -> list[Finding]:
    """Return findings about the dominant phase and about waiting."""
    times = step_times(stage)
    whole = sum(times.values())
    if not whole:
        return []
    shares = {name: seconds / whole for name, seconds in times.items()}
    first = next(iter(times))
    told = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:4])

    def finding(symptom: str, text: str, name: str, severity: str) -> Finding:
        evidence = (
            Evidence(f"{PREFIX}{name}", times[name], stage.last_step),
            Evidence(STEP, whole, stage.last_step),
        )
        then = NEXT_FOR_COMMUNICATION.get(name, ("what runs beside it on that machine",))
        return Finding(
            "communication", symptom, stage.label, text, evidence, then,
            "sick" if severity == "sick" else "note",
        )  # fmt: skip

    found = [finding("time", f"a step takes {whole:.3g} s: {told}", first, "note")]
    if shares.get("update_weights", 0.0) > thresholds.sync_share:
        share = shares["update_weights"]
        text = f"{share:.0%} of a step passes until new weights are served"
        found.append(finding("slow_sync", text, "update_weights", "sick"))
    if shares["other"] > thresholds.unnamed_share:
        text = f"{shares['other']:.0%} of a step is in no phase: something waits"
        found.append(finding("waiting", text, "other", "sick"))
    return found
