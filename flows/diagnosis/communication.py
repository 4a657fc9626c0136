"""Findings about the time of steps: dominant phase, weight sync, waiting."""

from collections.abc import Mapping
from math import isfinite
from statistics import median

from engines.config.diagnosis import DiagnosisConfig
from flows.diagnosis.findings import Evidence, Finding, StageView

STEP, SYNC, PREFIX = "timing_s/step", "timing_s/update_weights", "timing_s/"
NEXT = {
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
        then = NEXT.get(name, ("what runs beside it on that machine",))
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
