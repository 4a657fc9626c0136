"""Plans over real stores: what is certain, what is likely, and what differs from runs before."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from engines.config.stages.base import Runtime
from flows import plan as planning
from flows.plan import PlannedStage, Planner, plan_run
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.ray.api import JobRequest
from infra.store.stage_log import Attempt
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal
from tasks.runner import run as identity
from tasks.runner.run import StageRequest, StageResult, numeric_sources
from tasks.runner.submission import Submission

EDITED = "engines.trainers.supervised.trainer"
RUN = "a" * 64
LEARNING_RATE = "sft.optimizer.lr=0.002"


class Jobs:
    """A job server that takes every job."""

    cluster_id = ""

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        return True


class Stages:
    """A run whose stages yield a text at once.

    Args:
        storage: of the run.
        fails: label of a stage that ends without a commit; so does the run.
    """

    seed = 0

    def __init__(self, storage: LocalStorage, fails: str = "") -> None:
        self.storage, self.fails = storage, fails

    def run(self, request: StageRequest) -> StageResult:
        fingerprint = request.fingerprint
        self.storage.runs.use(RUN, fingerprint)
        record = self.storage.lookup(fingerprint)
        if record is None:
            submission = Submission(
                request=request, storage=self.storage, runtime=Runtime(), metadata={},
                follower="me", run_key=RUN, adopts=None,
            )  # fmt: skip
            attempt = len(self.storage.attempts.entries(fingerprint))
            submission.submit(Jobs(), attempt, "")  # type: ignore[arg-type]
            if request.label == self.fails:
                raise InterruptedError
            record = self._commit(request, attempt)
        return StageResult(
            label=request.label, fingerprint=fingerprint, artifact=record.artifact, reused=False,
            wall_s=0.0, metrics={}, job_seconds={},
        )  # fmt: skip

    def _commit(self, request: StageRequest, attempt: int) -> CommitRecord:
        holder = self.storage.attempts.entries(request.fingerprint)[attempt].holder.id
        made = self.storage.channel(request.fingerprint).local_dir(attempt) / "output"
        made.mkdir()
        (made / "text").write_text(request.fingerprint)
        kind = {"sft": "policy", "rl_round": "policy"}.get(request.config.stage, "model")
        record = CommitRecord(
            fingerprint=request.fingerprint,
            stage=request.config.stage,
            artifact=self.storage.publish(made, kind),
            attempt=attempt,
            committed_at="2026-01-01T00:00:00+00:00",
        )
        return self.storage.commit(Attempt(request.fingerprint, attempt, holder), record)


def recipe(storage: LocalStorage, *overrides: str) -> Recipe:
    hardware = "hardware={platform: cpu, device_kind: x86_64}"
    return load_recipe(
        "quickstart", ["rl.num_rounds=1", hardware, f"location.store={storage.uri}", *overrides]
    )


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """Of a home in which the quickstart was run."""
    storage = LocalStorage(tmp_path / "store")
    run_stages(recipe(storage), Stages(storage), lambda _: None)
    return storage


def plan(
    storage: LocalStorage, *overrides: str, force: Collection[str] = ()
) -> dict[str, PlannedStage]:
    planner = plan_run(recipe(storage, *overrides), dict.fromkeys(force, "token"))
    return {stage.label: stage for stage in planner.stages}


def statuses(stages: dict[str, PlannedStage]) -> dict[str, str]:
    return {label: stage.status for label, stage in stages.items() if stage.status != "hit"}


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def edited(module: str) -> None:
        def sources(roots: Sequence[str]) -> dict[str, str]:
            found = numeric_sources(roots)
            return {**found, module: "edited"} if module in found else found

        monkeypatch.setattr(identity, "numeric_sources", sources)

    return edited


def test_stages_after_a_forced_one_are_reused_if_output_is_equal(
    storage: LocalStorage,
) -> None:
    digest = plan(storage)["sft"].digest
    found = plan(storage, force=["sft"])
    assert list(found)[1:3] == ["sft", "evaluate_sft"]
    assert statuses(found) == {
        "sft": "miss",
        **dict.fromkeys([*found][2:], "likely_reuse"),
    }
    assert found["sft"].why == f"forced; it yielded {digest[:12]} before"
    assert {found[label].why for label in [*found][2:]} == {
        f"reused if sft yields {digest[:12]} again"
    }
    assert {found[label].fingerprint for label in [*found][2:]} == {""}
    both = plan(storage, force=["sft", "rl_round_1"])
    assert both["evaluate_sft"].status == "likely_reuse"
    assert both["rl_round_1"].status == "likely_run"
    assert both["merge"].why.startswith("reused if rl_round_1 yields ")


def test_an_edit_may_change_nothing_and_is_named(
    storage: LocalStorage, edit: Callable[[str], None]
) -> None:
    before = plan(storage)["sft"]
    edit(EDITED)
    found = plan(storage)
    assert found["sft"].why == f"differs from {before.fingerprint[:12]}: sources {EDITED}"
    assert found["evaluate_sft"].status == "likely_reuse"
    assert found["evaluate_sft"].why == f"reused if sft yields {before.digest[:12]} again"


def test_what_the_likely_input_does_not_save_is_to_run(
    storage: LocalStorage, edit: Callable[[str], None]
) -> None:
    before = plan(storage)
    edit(EDITED)
    found = plan(storage, "rl.optimizer.lr=0.5")
    assert found["rl_round_1"].status == "likely_run"
    differs = f"differs from {before['rl_round_1'].fingerprint[:12]}: rl.optimizer.lr "
    assert found["rl_round_1"].why.startswith(differs)
    assert found["merge"].status == "likely_run"


def test_bad_input_row_36_and_37_config_diff_names_both_values(
    storage: LocalStorage,
) -> None:
    before = plan(storage)
    found = plan(storage, LEARNING_RATE)
    differs = f"differs from {before['sft'].fingerprint[:12]}: sft.optimizer.lr "
    assert found["sft"].why.startswith(differs)
    assert found["sft"].why.endswith(" -> 0.002")
    assert set(statuses(found).values()) == {"miss", "likely_run"}
    unless = f"runs unless sft yields {before['sft'].digest[:12]} again"
    assert found["evaluate_sft"].why == found["rl_round_1"].why == unless


def test_the_nearest_run_is_named_and_not_the_latest(storage: LocalStorage) -> None:
    near = plan(storage)["sft"].fingerprint
    far = recipe(storage, "sft.optimizer.lr=0.5", "sft.batch_size_sequences=4")
    run_stages(far, Stages(storage), lambda _: None)
    assert plan(storage, LEARNING_RATE)["sft"].why.startswith(f"differs from {near[:12]}: ")


def test_what_died_without_a_step_is_nothing_to_compare_with(storage: LocalStorage) -> None:
    near = plan(storage)["sft"].fingerprint
    with pytest.raises(InterruptedError):
        run_stages(
            recipe(storage, "sft.optimizer.lr=0.004"),
            Stages(storage, fails="sft"),
            lambda _: None,
        )
    assert plan(storage, LEARNING_RATE)["sft"].why.startswith(f"differs from {near[:12]}: ")


def test_fault_row_26_partial_work_is_compared_and_continued(storage: LocalStorage) -> None:
    new = ("data.arithmetic.num_sft=100", "sft.optimizer.lr=0.004")
    with pytest.raises(InterruptedError):
        run_stages(recipe(storage, *new), Stages(storage, fails="sft"), lambda _: None)
    fingerprint = plan(storage, *new)["sft"].fingerprint
    channel = storage.channel(fingerprint)
    (channel.steps_dir(0) / "step-00000005").mkdir(parents=True)
    with Journal(channel.local_dir(0) / "journal.jsonl") as journal:
        journal.progress(5, 10, "step 5/10")
    assert plan(storage, *new)["sft"].why == "goes on from its step 5"
    found = plan(storage, new[0], LEARNING_RATE)["sft"]
    assert found.why == f"differs from {fingerprint[:12]}: sft.optimizer.lr 0.004 -> 0.002"
    assert found.adoption.startswith(f"step 5 of {fingerprint[:12]} cannot be adopted; ")


def test_another_round_and_another_seed(storage: LocalStorage) -> None:
    before = plan(storage)
    found = plan(storage, "rl.num_rounds=2")
    assert (found["rl_round_2"].status, found["rl_round_2"].why) == ("miss", "")
    assert found["evaluate_rl_round_2"].why == ""
    unless = f"runs unless rl_round_2 yields {before['rl_round_1'].digest[:12]} again"
    assert found["merge"].why == unless
    seeded = Planner(storage, 1, {})
    run_stages(recipe(storage, "seed=1"), seeded, lambda _: None)
    assert "seed 0 -> 1" in seeded.stages[0].why


def test_an_empty_store_has_nothing_to_say(tmp_path: Path) -> None:
    found = plan(LocalStorage(tmp_path / "empty"))
    assert {stage.why for stage in found.values()} == {""}
    assert [*statuses(found).values()] == ["miss", *["likely_run"] * (len(found) - 1)]


def test_damage_behind_a_stage_that_is_to_run_stops_no_plan(storage: LocalStorage) -> None:
    before = plan(storage)
    for label in ("sft", "evaluate_sft"):
        directory = f"artifacts/*/{before[label].digest}/manifest.json"
        [manifest] = Path(storage.uri).glob(directory)
        manifest.write_text("{}")
    found = plan(storage, force=["sft"])
    assert (found["sft"].status, found["evaluate_sft"].status) == ("miss", "likely_run")


def test_from_reuses_earlier_stages_and_refuses_unfinished_ones(storage: LocalStorage) -> None:
    tokens = {"rl_round_1": "token"}
    planner = plan_run(recipe(storage), tokens, start_from="rl_round_1")
    assert [stage.status for stage in planner.stages][:5] == [
        "hit", "hit", "hit", "miss", "likely_reuse",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        plan_run(recipe(storage, LEARNING_RATE), tokens, start_from="rl_round_1")
    assert str(refused.value) == (
        "--from: got 'rl_round_1'; need every stage before it done, and sft is not; "
        "run --from sft, or without --from"
    )
    plan_run(recipe(storage, LEARNING_RATE), {"sft": "token"}, start_from="sft")


def test_likely_unchanged_champion_is_not_its_own_rival(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Artifact] = []

    class Champion:
        def __init__(self, *_: object) -> None: ...

        def incumbent(self, candidate: Artifact) -> Artifact | None:
            asked.append(candidate)
            return None

    merged = plan(storage)["merge"].digest
    monkeypatch.setattr(planning, "Registry", Champion)
    found = plan(storage, force=["rl_round_1"])
    assert [each.digest for each in asked] == [merged]
    assert found["promote"].status == "likely_reuse"
    plan(storage, LEARNING_RATE)
    assert asked[-1].digest == "", "something new"


@pytest.mark.parametrize("option", ["--from", "--force", "--adopt"])
def test_an_unknown_stage_is_one_line_with_the_nearest(storage: LocalStorage, option: str) -> None:
    name = "rl_ruond_1"
    with pytest.raises(ConfigError) as refused:
        plan_run(
            recipe(storage),
            {} if option == "--adopt" else {name: "token"},
            [name] if option == "--adopt" else [],
            name if option == "--from" else None,
        )
    assert str(refused.value).startswith(f"{option}: no '{name}'; known: preprocess, sft, ")
    assert str(refused.value).endswith("; did you mean rl_round_1?")
