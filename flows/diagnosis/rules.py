"""Rules of a diagnosis: symptoms in training curves, memory and processes, time of steps.

Promises: pure functions of the stages' records and the thresholds. A trend compares means over two
windows; counts and times need one step. A missing metric gives no finding.
Does not promise: that a curve without a symptom is good.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import median

from engines.config.recipe import DiagnosisConfig, RoundSymptom
from flows.diagnosis.findings import (
    Evidence,
    Finding,
    Points,
    Severity,
    StageView,
    compared,
    points,
    windows,
)
from tasks.runner.memory_knobs import memory_knobs

SCORE, BEST_SCORE = "critic/score/mean", "critic/score/max"
ENTROPY, LENGTH, CUT = "actor/entropy", "response_length/mean", "response_length/clip_ratio"
TO_REFERENCE = ("actor/kl_loss", "actor/reward_kl_penalty")
KL = (*TO_REFERENCE, "actor/ppo_kl")
MISMATCH = "mismatch/logprob_abs_mean"
SKIPPED, POISONED = "training/skipped_steps", "training/poisoned_updates"
LOSS = "train/loss"
CURVES = {
    "reward": (SCORE,),
    "KL": KL,
    "entropy": (ENTROPY,),
    "response length": (LENGTH,),
    "mismatch": (MISMATCH,),
}
"""Metrics of each plot; the first that a run has is shown."""

SOLVED = 0.95
"""Mean score relative to the best score above which low entropy is no problem."""
LOSS_GROWTH = 1.5

Rounds = Sequence[StageView]
Rule = Callable[[Rounds, DiagnosisConfig], Iterator[Finding]]


def round_findings(
    rounds: Rounds, evaluations: Mapping[str, StageView], thresholds: DiagnosisConfig
) -> list[Finding]:
    """Return the symptoms of the last of `rounds`, which are in order, from the first.

    `evaluations` are those of policies, by the label of the stage that trained them.
    """
    if not rounds:
        return []
    found = [finding for rule in RULES for finding in rule(rounds, thresholds)]
    return [*found, *_reward_hacking(rounds, evaluations, thresholds)]


def loss_findings(stage: StageView, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    """Yield a finding if the loss of a supervised stage diverges."""
    _, _, means = _ends([stage], thresholds, LOSS)
    if means and means[-1] > LOSS_GROWTH * min(means):
        yield Finding(
            "algorithm",
            "loss_divergence",
            stage.label,
            f"the loss rose to {means[-1]:.3g} after {min(means):.3g}",
            (compared([stage], LOSS, thresholds.window_num_steps, means.index(min(means))),),
            ("lower sft.optimizer.lr", "more num_warmup_steps", "look at the rows of those steps"),
        )


def poisoned_findings(stage: StageView) -> Iterator[Finding]:
    """Yield a finding if updates were skipped because of non-finite values."""
    _, curve = points([stage], POISONED)
    if curve and curve[-1][1]:
        said = [line for line in stage.messages if "the update is left out" in line]
        first = next(step for step, value in curve if value)
        yield Finding(
            "algorithm",
            "non_finite",
            stage.label,
            f"{curve[-1][1]:.0f} updates were left out{': ' + said[-1] if said else ''}",
            (Evidence(POISONED, curve[-1][1], first),),
            ("look at the named rows", "lower the learning rate", "dtype float32"),
        )


def _finding(
    symptom: RoundSymptom, rounds: Rounds, text: str, evidence: Sequence[Evidence], *then: str
) -> Finding:
    return Finding("algorithm", symptom, rounds[-1].label, text, tuple(evidence), then)


def _ends(
    rounds: Rounds, thresholds: DiagnosisConfig, *names: str
) -> tuple[str, Points, list[float]]:
    """Return a metric, its curve, and its window means, or no means if there are fewer than two."""
    name, curve = points(rounds, *names)
    means = windows(curve, thresholds.window_num_steps)
    return name, curve, means if len(means) > 1 else []


def _entropy_collapse(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    _, _, means = _ends(rounds, thresholds, ENTROPY)
    if not means or means[-1] >= thresholds.entropy_ratio * means[0]:
        return
    score, best = (_ends(rounds, thresholds, name)[2] for name in (SCORE, BEST_SCORE))
    if not (score and best and score[-1] >= SOLVED * best[-1] > 0):
        yield _finding(
            "entropy_collapse",
            rounds,
            f"the policy's entropy fell to {means[-1] / max(means[0], 1e-12):.0%} of what it was, "
            "and answers still differ in score: it explores no more",
            (compared(rounds, ENTROPY, thresholds.window_num_steps),),
            "rl.algorithm.clip_ratio_high above clip_ratio_low",
            "rl.algorithm.use_kl_loss, or rl.algorithm.entropy_coeff",
            "a lower rl.optimizer.lr",
            "rl.algorithm.filter_groups, to train only on prompts that are solved sometimes",
        )


def _length_explosion(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    _, _, means = _ends(rounds, thresholds, LENGTH)
    if not means or means[-1] < thresholds.length_growth * means[0]:
        return
    cut, score = (_ends(rounds, thresholds, name)[2] for name in (CUT, SCORE))
    share, gain = (cut or [0.0])[-1], score[-1] - score[0] if score else 0.0
    if share >= thresholds.cut_share or gain <= 0:
        yield _finding(
            "length_explosion",
            rounds,
            f"answers are {means[-1] / max(means[0], 1e-12):.1f} times as long as at first, "
            f"{share:.0%} of them cut, and the score changed by {gain:+.3g}",
            (compared(rounds, LENGTH, thresholds.window_num_steps), Evidence(CUT, share)),
            "rl.algorithm.overlong, a penalty for long answers",
            "rl.algorithm.loss_agg_mode seq-mean-token-sum-norm",
            "look at the longest samples: `rlhf show`",
        )


def _reward_collapse(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    _, _, means = _ends(rounds, thresholds, SCORE)
    if means and max(means) > 0 and means[-1] < (1 - thresholds.score_fall) * max(means):
        yield _finding(
            "reward_collapse",
            rounds,
            f"the score fell to {means[-1]:.3g} after {max(means):.3g}",
            (compared(rounds, SCORE, thresholds.window_num_steps, means.index(max(means))),),
            "a lower rl.optimizer.lr, or fewer rl.num_epochs",
            "rl.algorithm.use_kl_loss",
            "the other symptoms here: one of them may have come first",
        )


def _kl_runaway(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    name, _, means = _ends(rounds, thresholds, *KL)
    if means and means[-1] > thresholds.max_kl:
        place = "the reference" if name in TO_REFERENCE else "the policy that sampled"
        yield _finding(
            "kl_runaway",
            rounds,
            f"the policy is {means[-1]:.3g} nats a token away from {place}",
            (compared(rounds, name, thresholds.window_num_steps),),
            "rl.algorithm.use_kl_loss with a greater kl_loss_coef",
            "a lower rl.optimizer.lr, or fewer rl.num_epochs",
            "rl.refresh_reference, if the distance is wanted",
        )


def _drift(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    _, _, means = _ends(rounds, thresholds, MISMATCH)
    if means and means[-1] >= max(thresholds.mismatch_floor, thresholds.mismatch_growth * means[0]):
        yield _finding(
            "drift",
            rounds,
            f"sampler and trainer disagree by {means[-1]:.3g} nats a token, {means[0]:.3g} at "
            "first: what is sampled is no longer what is trained",
            (compared(rounds, MISMATCH, thresholds.window_num_steps),),
            "rollout.dtype float32, or that of the training",
            "rl.sampling.top_p 1 and top_k 0",
            "rl.mismatch.mean, so that such a step ends the round",
        )


def _no_signal(rounds: Rounds, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    _, curve, means = _ends(rounds, thresholds, SKIPPED)
    if means and means[-1] >= thresholds.skipped_share:
        yield _finding(
            "no_signal",
            rounds,
            f"{means[-1]:.0%} of the last steps had nothing to train on",
            (Evidence(SKIPPED, means[-1], curve[-1][0]),),
            "prompts that the policy solves sometimes",
            "more samples for a prompt (rl.group_size)",
            "look at the rewards: `rlhf show`",
        )


def _reward_hacking(
    rounds: Rounds, evaluations: Mapping[str, StageView], thresholds: DiagnosisConfig
) -> Iterator[Finding]:
    """Detect a rising training score with a held-out accuracy below its earlier best."""
    last = evaluations.get(rounds[-1].label)
    now = last.metrics.get("accuracy") if last else None
    before = {
        label: each.metrics["accuracy"]
        for label, each in evaluations.items()
        if label != rounds[-1].label and "accuracy" in each.metrics
    }
    _, _, means = _ends(rounds, thresholds, SCORE)
    if now is None or not before or not means:
        return
    best = max(before, key=before.__getitem__)
    gain, fall = means[-1] - means[0], before[best] - now
    if gain >= thresholds.hacking_gain and fall >= thresholds.hacking_fall:
        yield _finding(
            "reward_hacking",
            rounds,
            f"the training score gained {gain:.3g} while the held-out accuracy lost {fall:.3g}: "
            "the policy learns the reward and not the task",
            (
                compared(rounds, SCORE, thresholds.window_num_steps),
                Evidence("accuracy", now, was=before[best], was_in=best),
            ),
            "read the samples with the best scores: `rlhf show`",
            "repair the reward, and see what it gives for such answers",
            "rl.algorithm.use_kl_loss",
        )


RULES: tuple[Rule, ...] = (
    _drift, _kl_runaway, _entropy_collapse, _length_explosion, _no_signal, _reward_collapse,
)  # fmt: skip


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
        "less memory: a rank that dies without an error was often killed for using too much",
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


def resource_findings(stage: StageView, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    """Yield the failure of an uncommitted stage, growth of its memory and lost replicas."""
    _, memory = points([stage], PEAK_MEMORY)
    at = tuple(Evidence(PEAK_MEMORY, value, step) for step, value in memory[-1:])
    if stage.problem is not None:
        cause, message = stage.problem.cause, stage.problem.message
        then = NEXT.get(cause, ANY_NEXT)
        if cause == "out_of_memory":
            then = (*memory_knobs(stage.config, stage.problem.phase), ANY_NEXT[-1])
        area = "algorithm" if cause == "non_finite" else "resources"
        text = message.splitlines()[0] if message else stage.problem.type
        yield Finding(area, cause or "failed", stage.label, text, at, then, "failed")
    elif stage.is_gone:
        text = (
            f"its process ended without an error in phase {stage.phase}"
            f"{f' after step {stage.last_step}' if stage.last_step is not None else ''}: it was "
            "killed, by a user or because its machine ran out of memory"
        )
        then = (
            "the kernel's log of that machine",
            *memory_knobs(stage.config, stage.phase),
            ANY_NEXT[-1],
        )
        yield Finding("resources", "killed", stage.label, text, at, then, "failed")
    _, _, means = _ends([stage], thresholds, PEAK_MEMORY)
    if means and means[-1] >= thresholds.memory_growth * means[0]:
        yield Finding(
            "resources",
            "memory_growth",
            stage.label,
            f"peak memory grew from {means[0]:.3g} GB to {means[-1]:.3g} GB",
            (compared([stage], PEAK_MEMORY, thresholds.window_num_steps),),
            (*memory_knobs(stage.config), "find out if answers grew, or if memory is never freed"),
        )
    _, restarts = points([stage], RESTARTS)
    if restarts and restarts[-1][1]:
        step = next(step for step, value in restarts if value)
        text = f"{restarts[-1][1]:.0f} rollout engines were lost and started again"
        then = ("the logs of those engines", "rollout.silence_s, if they were only slow")
        evidence = Evidence(RESTARTS, restarts[-1][1], step)
        yield Finding("resources", "replica_lost", stage.label, text, (evidence,), then)


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
    timed = (
        {n: value for n, value in found.items() if n.startswith(PREFIX) and isfinite(value)}
        for found in stage.steps.values()
    )
    steps = [found for found in timed if STEP in found]
    names = {name for found in steps for name in found} - {STEP}
    if not names:
        return {}
    phases = {
        name.removeprefix(PREFIX): median(found.get(name, 0.0) for found in steps) for name in names
    }
    phases["other"] = max(0.0, median(2 * found[STEP] - sum(found.values()) for found in steps))
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def time_findings(stage: StageView, thresholds: DiagnosisConfig) -> Iterator[Finding]:
    """Yield findings about the dominant phase, weight transfer and waiting."""
    times = step_times(stage)
    whole = sum(times.values())
    if not whole:
        return
    shares = {name: seconds / whole for name, seconds in times.items()}
    told = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:4])

    def finding(symptom: str, text: str, name: str, severity: Severity) -> Finding:
        evidence = (
            Evidence(f"{PREFIX}{name}", times[name], stage.last_step),
            Evidence(STEP, whole, stage.last_step),
        )
        then = NEXT_FOR_COMMUNICATION.get(name, ("what runs beside it on that machine",))
        return Finding("communication", symptom, stage.label, text, evidence, then, severity)

    yield finding("time", f"a step takes {whole:.3g} s: {told}", next(iter(times)), "note")
    share = shares.get("update_weights", 0.0)
    if share > thresholds.sync_share:
        text = f"{share:.0%} of a step passes until new weights are served"
        yield finding("slow_sync", text, "update_weights", "sick")
    if shares["other"] > thresholds.unnamed_share:
        text = f"{shares['other']:.0%} of a step is in no phase: something waits"
        yield finding("waiting", text, "other", "sick")
