"""Each symptom on curves made by hand: that it is named, and that healthy curves show none."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from engines.config.recipe import DiagnosisConfig, RoundSymptom
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.diagnosis import rules
from flows.diagnosis.diagnosis import diagnose, html_page, markdown, symptoms, text
from flows.diagnosis.findings import Finding, StageView, windows
from flows.diagnosis.rules import loss_findings, poisoned_findings
from flows.recipe.recipe import Recipe
from flows.stage_order import stages_of
from tests.unit.flows.diagnosis.conftest import HEALTHY, columns_to_steps

DEFAULTS = DiagnosisConfig()
NUM_STEPS = 40


def line(start: float, end: float, num_steps: int = NUM_STEPS) -> list[float]:
    return [start + (end - start) * step / (num_steps - 1) for step in range(num_steps)]


FLAT = [0.4] * NUM_STEPS
RoundView = Callable[..., StageView]

CASES = {
    "entropy_collapse": (
        {"actor__entropy": line(0.5, 0.01), "critic__score__mean": FLAT},
        {"actor__entropy": line(0.5, 0.2), "critic__score__mean": FLAT},
    ),
    "length_explosion": (
        {"response_length__mean": line(100, 500), "critic__score__mean": line(0.4, 0.38)},
        # What reasoning does when it pays.
        {"response_length__mean": line(100, 500), "critic__score__mean": line(0.4, 0.7)},
    ),
    "reward_collapse": (
        {"critic__score__mean": [*line(0.2, 0.7, 20), *line(0.7, 0.1, 20)]},
        {"critic__score__mean": [*line(0.2, 0.7, 20), *line(0.7, 0.6, 20)]},
    ),
    "kl_runaway": ({"actor__kl_loss": line(0.0, 3.0)}, {"actor__kl_loss": line(0.0, 0.1)}),
    "drift": (
        {"mismatch__logprob_abs_mean": line(1e-6, 1e-3)},
        # Rounding that grows stays rounding.
        {"mismatch__logprob_abs_mean": line(1e-7, 4e-6)},
    ),
    "no_signal": (
        {"training__skipped_steps": [0.0] * 30 + [1.0] * 10},
        {"training__skipped_steps": [0.0, 1.0, 0.0, 0.0] * 10},
    ),
}


def found(view: StageView) -> dict[str, Finding]:
    return {each.symptom: each for each in symptoms([view], [view], DEFAULTS)}


@pytest.mark.parametrize("symptom", CASES)
def test_a_symptom_is_named_where_it_shows_and_nowhere_else(
    symptom: str, round_view: RoundView
) -> None:
    sick, healthy = (round_view(**columns) for columns in CASES[symptom])
    ill = found(sick)
    assert set(ill) == {symptom}
    assert found(healthy) == {}
    assert ill[symptom].evidence[0].step == NUM_STEPS
    assert ill[symptom].stage == "rl_round_1"
    assert ill[symptom].next


def test_every_rule_has_a_case() -> None:
    assert {*CASES, "reward_hacking"} == {*get_args(RoundSymptom)}


def test_reward_hacking_is_detected_by_held_out_accuracy(
    round_view: RoundView, evaluation: Callable[[str, float], StageView]
) -> None:
    rounds = [round_view(critic__score__mean=line(0.3, 0.8))]
    before = evaluation("sft", 0.6)
    (hacked,) = symptoms(rounds, [before, evaluation("rl_round_1", 0.5)], DEFAULTS)
    assert hacked.symptom == "reward_hacking"
    assert [(each.metric, each.step) for each in hacked.evidence] == [
        ("critic/score/mean", 40),
        ("accuracy", None),
    ]
    assert symptoms(rounds, [before, evaluation("rl_round_1", 0.59)], DEFAULTS) == []
    assert symptoms(rounds, [before], DEFAULTS) == [], "nobody has evaluated it yet"
    tuned = [evaluation("sft", 0.4), evaluation("preference", 0.6), evaluation("rl_round_1", 0.5)]
    (lost,) = symptoms(rounds, tuned, DEFAULTS)
    assert lost.evidence[-1].was_in == "preference"
    flat = [round_view(critic__score__mean=FLAT)]
    assert symptoms(flat, [before, evaluation("rl_round_1", 0.5)], DEFAULTS) == []


def test_a_task_that_is_solved_leaves_no_entropy_and_is_not_sick(round_view: RoundView) -> None:
    solved = {"critic__score__mean": line(0.5, 1.0), "critic__score__max": [1.0] * NUM_STEPS}
    assert found(round_view(actor__entropy=line(0.5, 0.001), **solved)) == {}


def test_answers_that_grow_into_the_limit_are_no_gain(round_view: RoundView) -> None:
    grown = {"response_length__mean": line(100, 500), "critic__score__mean": line(0.4, 0.5)}
    cut = found(round_view(**grown, response_length__clip_ratio=line(0.0, 0.6)))
    assert set(cut) == {"length_explosion"}
    assert found(round_view(**grown, response_length__clip_ratio=line(0.0, 0.1))) == {}


def test_symptom_spanning_two_rounds_is_reported_in_the_second(round_view: RoundView) -> None:
    rounds = [
        round_view(1, 1, actor__entropy=line(0.5, 0.2)),
        round_view(2, 41, actor__entropy=line(0.2, 0.05)),
    ]
    (finding,) = diagnose("r", rounds, DEFAULTS).ills
    assert (finding.symptom, finding.stage) == ("entropy_collapse", "rl_round_2")
    assert finding.evidence[0].step == 80
    assert str(finding.evidence[0]) == (
        "actor/entropy 0.05769 at step 80, was 0.4846 at step 5 in rl_round_1"
    )


def three_rounds(round_view: RoundView) -> list[StageView]:
    """The entropy of the second falls, and stays where it is in the third."""
    curves = {1: [0.5] * 20, 2: line(0.5, 0.001, 20), 3: [0.001] * 20}
    return [
        replace(round_view(n, 20 * n - 19, actor__entropy=curve), is_committed=True)
        for n, curve in curves.items()
    ]


def test_a_symptom_is_told_of_every_round_that_shows_it(round_view: RoundView) -> None:
    rounds = three_rounds(round_view)
    diagnosis = diagnose("r", rounds, DEFAULTS)
    assert diagnosis.verdict == "r: entropy_collapse (rl_round_2, rl_round_3)"
    (_, third) = diagnosis.ills
    assert third.evidence[0].was_in == "rl_round_1"
    begun = replace(rounds[2], steps={})
    told = diagnose("r", [*rounds[:2], begun], DEFAULTS).verdict
    assert told == "r: entropy_collapse (rl_round_2)", "it shows nothing yet"


def test_a_rejected_round_is_marked_and_counts_for_none_after_it(
    round_view: RoundView, evaluation: Callable[[str, float], StageView]
) -> None:
    gate = DiagnosisConfig(reject_round=("entropy_collapse",))
    rounds = three_rounds(round_view)
    scores = [replace(evaluation(each.label, 0.5), is_committed=True) for each in rounds]
    told = diagnose("r", [*rounds, *scores], gate)
    assert told.verdict == "r: entropy_collapse (rejected rl_round_2, rejected rl_round_3)"
    for said in (text(told), html_page(told), markdown(told, Path("/page"))):
        assert "rejected rl_round_2" in said
    falls = replace(rounds[2], steps={step: {"actor/entropy": 0.4} for step in rounds[2].steps})
    told = diagnose("r", [*rounds[:2], falls, *scores], gate)
    assert told.verdict == "r: entropy_collapse (rejected rl_round_2)"
    unjudged = diagnose("r", [*rounds[:2], scores[0]], gate)
    assert unjudged.verdict == "r: entropy_collapse (rl_round_2)", "it has no evaluation yet"


def test_the_best_of_before_is_told_beside_what_fell(
    round_view: RoundView, evaluation: Callable[[str, float], StageView]
) -> None:
    scores = [evaluation("sft", 0.6), evaluation("rl_round_1", 0.5)]
    (hacked,) = symptoms([round_view(critic__score__mean=line(0.3, 0.8))], scores, DEFAULTS)
    assert str(hacked.evidence[1]) == "accuracy 0.5, was 0.6 in sft"
    fallen = found(round_view(critic__score__mean=[*line(0.2, 0.8, 20), *line(0.8, 0.1, 20)]))
    number = fallen["reward_collapse"].evidence[0]
    assert (number.was_step, number.was_in) == (20, "rl_round_1"), "where the best window ends"


def test_a_loss_that_runs_away(recipe: Recipe) -> None:
    config = SFTStageConfig.from_recipe(recipe)

    def view(values: list[float]) -> StageView:
        return StageView("sft", config, columns_to_steps({"train/loss": values}))

    (finding,) = loss_findings(view([*line(3.0, 1.0, 20), *line(1.0, 4.0, 20)]), DEFAULTS)
    assert finding.symptom == "loss_divergence"
    assert not [*loss_findings(view(line(3.0, 1.0)), DEFAULTS)]
    assert not [*loss_findings(view([math.nan] * 40), DEFAULTS)]


def test_updates_that_were_left_out_are_told_with_their_rows(round_view: RoundView) -> None:
    view = round_view(training__poisoned_updates=[0.0, 0.0, 1.0, 1.0])
    said = "policy: loss is nan; the update is left out; spoiled by step=3/prompt=1"
    view = StageView(view.label, view.config, view.steps, (said,))
    (finding,) = poisoned_findings(view)
    assert said in finding.text
    assert finding.evidence[0].step == 3
    assert not [*poisoned_findings(round_view(training__poisoned_updates=[0.0] * 4))]


def test_real_healthy_runs_have_no_symptom(
    recipe: Recipe,
    healthy_rounds: list[StageView],
    evaluation: Callable[[str, float], StageView],
) -> None:
    scores = [evaluation("sft", 0.35), evaluation("rl_round_1", 0.58)]
    scores += [evaluation("rl_round_2", 0.65), evaluation("rl_round_3", 0.69)]
    sft = StageView("sft", SFTStageConfig.from_recipe(recipe), columns_to_steps(HEALTHY["sft"]))
    ppo = StageView(
        "rl_round_1", RLRoundStageConfig.from_recipe(recipe, 1), columns_to_steps(HEALTHY["ppo"])
    )
    for views in ([sft, *healthy_rounds, *scores], [ppo]):
        assert diagnose("healthy", views, DEFAULTS).ills == []


def test_a_healthy_run_that_goes_on_has_none_at_any_step(healthy_rounds: list[StageView]) -> None:
    steps = {step: found for view in healthy_rounds for step, found in view.steps.items()}
    for last in range(1, len(steps) + 1):
        view = healthy_rounds[0]
        so_far = StageView(view.label, view.config, {s: steps[s] for s in range(1, last + 1)})
        assert diagnose("healthy", [so_far], DEFAULTS).ills == [], last


@given(st.lists(st.floats(width=32), max_size=40), st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_curve_is_too_odd(recipe: Recipe, values: list[float], window: int) -> None:
    names = [metric for names in rules.KL for metric in (names,)]
    names += [rules.SCORE, rules.ENTROPY, rules.LENGTH, rules.MISMATCH]
    names += [rules.SKIPPED, rules.POISONED, rules.PEAK_MEMORY, rules.STEP]
    steps = {step: dict.fromkeys(names, value) for step, value in enumerate(values)}
    view = StageView("rl_round_1", RLRoundStageConfig.from_recipe(recipe, 1), steps)
    for finding in diagnose("odd", [view], DiagnosisConfig(window_num_steps=window)).findings:
        assert all(math.isfinite(each.value) for each in finding.evidence)


def test_windows_end_where_the_curve_ends() -> None:
    curve = [(step, float(step)) for step in range(1, 8)]
    assert windows(curve, 3) == [3.0, 6.0]
    assert windows(curve[:2], 3) == []


def test_a_gate_is_named_once_and_is_a_symptom() -> None:
    with pytest.raises(ValidationError, match="drift, which end_run has too"):
        DiagnosisConfig(end_run=("drift",), reject_round=("drift",))
    with pytest.raises(ValidationError, match="end_run"):
        DiagnosisConfig.model_validate({"end_run": ["gloom"]})


def test_no_threshold_changes_a_stage_or_the_name_of_a_run(recipe: Recipe) -> None:
    changed = recipe.model_copy(update={"diagnosis": DiagnosisConfig(max_kl=9, end_run=("drift",))})
    assert changed.run_name == recipe.run_name
    for one, other in zip(stages_of(recipe), stages_of(changed), strict=True):
        assert one.identity_values() == other.identity_values()


def test_settings_that_are_advised_exist() -> None:
    """A recipe's path that was renamed would be advice that is refused."""
    texts = Path(rules.__file__).read_text("utf-8")
    roots = "rl|rollout|training|checkpoint|location|sft"
    paths = {*re.findall(rf"\b((?:{roots})\.[a-z_]+(?:\.[a-z_]+)*)", texts)}
    assert len(paths) > 15
    for path in paths:
        model: type[BaseModel] = Recipe
        for part in path.split("."):
            assert part in model.model_fields, path
            kind = model.model_fields[part].annotation
            kinds = [kind, *getattr(kind, "__args__", ())]
            models = [each for each in kinds if isinstance(each, type)]
            model = next((each for each in models if issubclass(each, BaseModel)), BaseModel)
