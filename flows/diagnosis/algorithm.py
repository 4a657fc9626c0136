"""Findings from training curves: named symptoms of RL, and a diverging loss.

Promises: pure functions of the stages' records and the thresholds. A symptom compares means over
windows; a missing metric, or a curve of fewer than two windows, gives no finding.
Does not promise: that a curve without a symptom is good.
"""

from collections.abc import Callable, Mapping, Sequence

from engines.config.recipe import DiagnosisConfig, RoundSymptom
from flows.diagnosis.findings import (
    Evidence,
    Finding,
    Points,
    StageView,
    compared,
    points,
    windows,
)

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
Rule = Callable[[Rounds, DiagnosisConfig], Finding | None]


def round_findings(
    rounds: Rounds, evaluations: Mapping[str, StageView], thresholds: DiagnosisConfig
) -> list[Finding]:
    """Return the symptoms of the last of `rounds`, which are in order, from the first.

    `evaluations` are those of policies, by the label of the stage that trained them.
    """
    if not rounds:
        return []
    found = [rule(rounds, thresholds) for rule in RULES]
    found.append(_reward_hacking(rounds, evaluations, thresholds))
    return [finding for finding in found if finding is not None]


def loss_findings(stage: StageView, thresholds: DiagnosisConfig) -> list[Finding]:
    """Return a finding if the loss of a supervised stage diverges."""
    _, curve = points([stage], LOSS)
    means = windows(curve, thresholds.window_num_steps)
    if len(means) < 2 or means[-1] <= LOSS_GROWTH * min(means):
        return []
    return [
        Finding(
            "algorithm",
            "loss_divergence",
            stage.label,
            f"the loss rose to {means[-1]:.3g} after {min(means):.3g}",
            (compared([stage], LOSS, thresholds.window_num_steps, means.index(min(means))),),
            ("lower sft.optimizer.lr", "more num_warmup_steps", "look at the rows of those steps"),
        )
    ]


def poisoned_findings(stage: StageView) -> list[Finding]:
    """Return a finding if updates were skipped because of non-finite values."""
    _, curve = points([stage], POISONED)
    if not curve or not curve[-1][1]:
        return []
    said = [line for line in stage.messages if "the update is left out" in line]
    first = next(step for step, value in curve if value)
    return [
        Finding(
            "algorithm",
            "non_finite",
            stage.label,
            f"{curve[-1][1]:.0f} updates were left out{': ' + said[-1] if said else ''}",
            (Evidence(POISONED, curve[-1][1], first),),
            ("look at the named rows", "lower the learning rate", "dtype float32"),
        )
    ]


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


def _entropy_collapse(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    _, _, means = _ends(rounds, thresholds, ENTROPY)
    if not means or means[-1] >= thresholds.entropy_ratio * means[0]:
        return None
    score, best = (_ends(rounds, thresholds, name)[2] for name in (SCORE, BEST_SCORE))
    if score and best and score[-1] >= SOLVED * best[-1] > 0:
        return None
    return _finding(
        "entropy_collapse",
        rounds,
        f"the policy's entropy fell to {means[-1] / max(means[0], 1e-12):.0%} of what it was, "
        "and answers still differ in score: it explores no more",
        (compared(rounds, ENTROPY, thresholds.window_num_steps),),
        "rl.algorithm.clip_ratio_high above clip_ratio_low",
        "rl.algorithm.use_kl_loss, or rl.algorithm.entropy_coeff",
        "a lower rl.optimizer.lr",
        "rl.algorithm.filter_groups, so that only prompts count that are solved now and then",
    )


def _length_explosion(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    _, _, means = _ends(rounds, thresholds, LENGTH)
    if not means or means[-1] < thresholds.length_growth * means[0]:
        return None
    cut, score = (_ends(rounds, thresholds, name)[2] for name in (CUT, SCORE))
    share, gain = (cut or [0.0])[-1], score[-1] - score[0] if score else 0.0
    if share < thresholds.cut_share and gain > 0:
        return None
    return _finding(
        "length_explosion",
        rounds,
        f"answers are {means[-1] / max(means[0], 1e-12):.1f} times as long as at first, "
        f"{share:.0%} of them cut, and the score changed by {gain:+.3g}",
        (compared(rounds, LENGTH, thresholds.window_num_steps), Evidence(CUT, share)),
        "rl.algorithm.overlong, a penalty for long answers",
        "rl.algorithm.loss_agg_mode seq-mean-token-sum-norm",
        "look at the longest samples: `rlhf show`",
    )


def _reward_collapse(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    _, _, means = _ends(rounds, thresholds, SCORE)
    if not means or max(means) <= 0 or means[-1] >= (1 - thresholds.score_fall) * max(means):
        return None
    return _finding(
        "reward_collapse",
        rounds,
        f"the score fell to {means[-1]:.3g} after {max(means):.3g}",
        (compared(rounds, SCORE, thresholds.window_num_steps, means.index(max(means))),),
        "a lower rl.optimizer.lr, or fewer rl.num_epochs",
        "rl.algorithm.use_kl_loss",
        "the other symptoms here: one of them may have come first",
    )


def _kl_runaway(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    name, _, means = _ends(rounds, thresholds, *KL)
    if not means or means[-1] <= thresholds.max_kl:
        return None
    place = "the reference" if name in TO_REFERENCE else "the policy that sampled"
    return _finding(
        "kl_runaway",
        rounds,
        f"the policy is {means[-1]:.3g} nats a token away from {place}",
        (compared(rounds, name, thresholds.window_num_steps),),
        "rl.algorithm.use_kl_loss with a greater kl_loss_coef",
        "a lower rl.optimizer.lr, or fewer rl.num_epochs",
        "rl.refresh_reference, if the distance is wanted",
    )


def _drift(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    _, _, means = _ends(rounds, thresholds, MISMATCH)
    if not means or means[-1] < max(
        thresholds.mismatch_floor, thresholds.mismatch_growth * means[0]
    ):
        return None
    return _finding(
        "drift",
        rounds,
        f"sampler and trainer disagree by {means[-1]:.3g} nats a token, {means[0]:.3g} at first: "
        "what is sampled is no longer what is trained",
        (compared(rounds, MISMATCH, thresholds.window_num_steps),),
        "rollout.dtype float32, or that of the training",
        "rl.sampling.top_p 1 and top_k 0",
        "rl.mismatch.mean, so that such a step ends the round",
    )


def _no_signal(rounds: Rounds, thresholds: DiagnosisConfig) -> Finding | None:
    _, curve, means = _ends(rounds, thresholds, SKIPPED)
    if not means or means[-1] < thresholds.skipped_share:
        return None
    return _finding(
        "no_signal",
        rounds,
        f"{means[-1]:.0%} of the last steps had nothing to train on",
        (Evidence(SKIPPED, means[-1], curve[-1][0]),),
        "prompts that the policy solves now and then",
        "more samples for a prompt (rl.group_size)",
        "look at the rewards: `rlhf show`",
    )


def _reward_hacking(
    rounds: Rounds, evaluations: Mapping[str, StageView], thresholds: DiagnosisConfig
) -> Finding | None:
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
        return None
    best = max(before, key=before.__getitem__)
    gain, fall = means[-1] - means[0], before[best] - now
    if gain < thresholds.hacking_gain or fall < thresholds.hacking_fall:
        return None
    return _finding(
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
