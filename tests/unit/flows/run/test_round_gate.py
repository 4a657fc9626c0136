"""A round with a symptom of the recipe ends the run or is passed over; nothing else trains."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from flows.plan import plan_run
from flows.recipe.recipe import Recipe
from flows.report.report import build_report, markdown
from flows.run.registry import RoundGate
from flows.stage_order import run_stages
from infra.errors import SickRunError
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, StageHistory
from tasks.runner.run import StageRequest, StageResult
from tests.unit.flows.test_plan import Stages, recipe

ENTROPY = {"rl_round_1": (0.5, 0.4), "rl_round_2": (0.01, 0.01), "rl_round_3": (0.4, 0.3)}
REJECT = "diagnosis={window_num_steps: 2, reject_round: [entropy_collapse]}"
END = "diagnosis={window_num_steps: 2, end_run: [entropy_collapse]}"
THREE = "rl.num_rounds=3"


class Training(Stages):
    """A run whose rounds record what they are told to."""

    def __init__(
        self, storage: LocalStorage, entropy: Mapping[str, Sequence[float]] = ENTROPY
    ) -> None:
        super().__init__(storage)
        self.entropy, self.kl = entropy, 0.0
        self.asked: dict[str, StageRequest] = {}
        self.results: dict[str, StageResult] = {}
        self.computed: list[str] = []

    def run(self, request: StageRequest) -> StageResult:
        self.asked[request.label] = request
        result = self.results[request.label] = super().run(request)
        return result

    def _commit(self, request: StageRequest, attempt: int) -> CommitRecord:
        self.computed.append(request.label)
        directory = self.storage.channel(request.fingerprint).local_dir(attempt)
        with Journal(directory / "journal.jsonl") as journal:
            first = 1 + request.config.num_previous_steps
            for step, value in enumerate(self.entropy.get(request.label, ()), start=first):
                journal.metrics(step, {"actor/entropy": value, "actor/kl_loss": self.kl})
        return super()._commit(request, attempt)


def trained(asked: Recipe, storage: LocalStorage, **kwargs) -> tuple[Training, RoundGate]:
    run = Training(storage, **kwargs)
    gate = RoundGate(asked.diagnosis, StageHistory(storage))
    run_stages(asked, run, lambda _: None, gate.accepts)
    return run, gate


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def test_stages_after_a_rejected_round_use_the_previous_policy(storage: LocalStorage) -> None:
    asked = recipe(storage, THREE, REJECT)
    run, gate = trained(asked, storage)
    assert list(gate.rejected) == ["rl_round_2"]
    digests = {label: result.artifact.digest for label, result in run.results.items()}
    assert run.asked["rl_round_2"].inputs["policy"].digest == digests["rl_round_1"]
    assert run.asked["rl_round_3"].inputs["policy"].digest == digests["rl_round_1"]
    assert run.asked["merge"].inputs["policy"].digest == digests["rl_round_3"]
    report = build_report(asked, list(run.results.values()), 1.0, gate.rejected)
    said = {stage.name: stage.rejected for stage in report.stages if stage.rejected}
    assert list(said) == ["rl_round_2"]
    assert {stage.name: stage.state for stage in report.stages}["rl_round_2"] == "rejected"
    assert said["rl_round_2"].startswith("entropy_collapse: the policy's entropy fell to 2%")
    assert "`rl_round_2` was rejected: entropy_collapse" in markdown(report, Path("nowhere"))


def test_a_repetition_decides_alike_and_trains_nothing(storage: LocalStorage) -> None:
    asked = recipe(storage, THREE, REJECT)
    trained(asked, storage)
    again, gate = trained(asked, storage)
    assert again.computed == []
    assert list(gate.rejected) == ["rl_round_2"]
    planner = plan_run(asked, {})
    assert planner.all_hit
    told = {stage.label: stage.rejected for stage in planner.stages if stage.rejected}
    assert list(told) == ["rl_round_2"]
    assert told["rl_round_2"].startswith("rejected: entropy_collapse: ")
    assert told["rl_round_2"].endswith("; what follows takes the policy of rl_round_1")


def test_other_thresholds_retrain_only_stages_with_a_new_policy(storage: LocalStorage) -> None:
    trained(recipe(storage, THREE, REJECT), storage)
    lenient, gate = trained(recipe(storage, THREE), storage)
    assert gate.rejected == {}
    assert lenient.computed == ["rl_round_3", "evaluate_rl_round_3", "merge", "evaluate", "promote"]
    assert trained(recipe(storage, THREE, REJECT), storage)[0].computed == []


def test_rejected_last_round_merges_the_previous_one(storage: LocalStorage) -> None:
    run, _ = trained(recipe(storage, "rl.num_rounds=2", REJECT), storage)
    merged = run.asked["merge"].inputs["policy"].digest
    assert merged == run.results["rl_round_1"].artifact.digest


def test_a_symptom_may_end_the_run_by_name(storage: LocalStorage) -> None:
    asked = recipe(storage, THREE, END)
    runs = [Training(storage), Training(storage)]
    for run in runs:
        gate = RoundGate(asked.diagnosis, StageHistory(storage))
        with pytest.raises(SickRunError, match=r"rl_round_2: entropy_collapse: .*at step 42"):
            run_stages(asked, run, lambda _: None, gate.accepts)
        assert "rl_round_3" not in run.asked
    assert runs[1].computed == [], "the second time nothing was trained"


def test_every_symptom_of_a_rejected_round_is_named(storage: LocalStorage) -> None:
    both = REJECT.replace("entropy_collapse", "kl_runaway, entropy_collapse")
    asked = recipe(storage, "sft=null", "rl.num_rounds=1", both)
    run, said = Training(storage, {"rl_round_1": (0.5, 0.5, 0.01, 0.01)}), dict[str, str]()
    run.kl = 9.0
    gate = RoundGate(asked.diagnosis, StageHistory(storage), said.__setitem__)
    with pytest.raises(SickRunError, match="every round was rejected"):
        run_stages(asked, run, lambda _: None, gate.accepts)
    (told,) = said.values()
    assert told.startswith("rejected: kl_runaway: the policy is 9 nats")
    assert "; entropy_collapse: the policy's entropy fell to 2%" in told
    assert told.endswith("; what follows takes the model that the run began with")
    assert gate.rejected["rl_round_1"] in told


def test_without_a_policy_that_counts_nothing_is_merged(storage: LocalStorage) -> None:
    falls = {"rl_round_1": (0.5, 0.5, 0.01, 0.01)}
    alone = recipe(storage, "sft=null", "rl.num_rounds=1", REJECT)
    with pytest.raises(SickRunError, match="every round was rejected"):
        trained(alone, storage, entropy=falls)
