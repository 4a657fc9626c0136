"""The incumbent of a registry, as an input of the decision."""

from pathlib import Path

import pytest
from committing_runner import ALL, MEASURING, CommittingRunner, run, two_rounds

from flows import stage_order
from flows.plan import Planner
from flows.stage_order import run_stages
from infra.errors import ServiceError
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage


def test_an_incumbent_is_evaluated_as_the_candidate_is(
    storage: LocalStorage, tmp_path: Path
) -> None:
    before = run(two_rounds(), storage, tmp_path)
    old = before.requests["evaluate"].inputs["model"]
    three = two_rounds("rl.num_rounds=3")
    after = run(three, storage, tmp_path, incumbent=old)
    assert after.ran == ["rl_round_3", "evaluate_rl_round_3", *ALL[7:]]
    assert (
        after.requests["evaluate_incumbent"].fingerprint == before.requests["evaluate"].fingerprint
    ), "its own run evaluated it"
    assert sorted(after.requests["promote"].inputs) == [
        "evaluation", "incumbent", "incumbent_evaluation", "model",
    ]  # fmt: skip
    assert run(three, storage, tmp_path, incumbent=old).ran == []
    fewer = two_rounds("rl.num_rounds=3", "evaluation.num_problems=7")
    measured = [*MEASURING[:3], "evaluate_rl_round_3", "evaluate", "evaluate_incumbent", "promote"]
    assert run(fewer, storage, tmp_path, incumbent=old).ran == measured


def test_another_incumbent_is_another_decision_and_nothing_else(
    storage: LocalStorage, tmp_path: Path
) -> None:
    others = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
        others.append(storage.publish(tmp_path / name, "model"))
    run(two_rounds(), storage, tmp_path)
    for other in others:
        ran = run(two_rounds(), storage, tmp_path, incumbent=other).ran
        assert ran == ["evaluate_incumbent", "promote"]
    # Even if both answer alike.
    constant = ("evaluate_incumbent",)
    fewer = two_rounds("evaluation.num_problems=7")
    run(fewer, storage, tmp_path, constant, others[0])
    ran = run(fewer, storage, tmp_path, constant, others[1]).ran
    assert ran == ["evaluate_incumbent", "promote"]


def test_incumbent_is_in_the_plan_before_candidate_is_known(
    storage: LocalStorage, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "content").write_text("old")
    old = storage.publish(tmp_path / "old", "model")
    run(two_rounds(), storage, tmp_path)
    planner = Planner(storage, 0, {})
    run_stages(two_rounds("rl.num_rounds=3"), planner, lambda _: old)
    status = {stage.label: stage.status for stage in planner.stages}
    assert (status["merge"], status["evaluate_incumbent"], status["promote"]) == (
        "likely_run", "miss", "likely_run",
    )  # fmt: skip


def test_without_an_answer_of_the_registry_nothing_is_promoted(
    storage: LocalStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = CommittingRunner(storage, tmp_path / "scratch")

    def away(candidate: Artifact) -> Artifact | None:
        raise ServiceError(f"nobody knows who is above {candidate.kind}")

    run_stages(two_rounds(), runner, away)
    assert runner.ran == ALL[:-1]
    said = [each.getMessage() for each in caplog.records if each.name == stage_order.__name__]
    assert said == ["promote: nobody knows who is above model"]
