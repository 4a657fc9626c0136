"""What runs and attempts that live need stays, however long ago they asked for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.garbage import DAY_S, collect
from infra.store.artifacts import digest_in_path, external_artifact
from infra.store.stage_spec import Artifact
from tests.unit.infra.garbage.directory import Store, fp, set_age

EVERYTHING_OLD = ({"unused_s": DAY_S}, {"max_bytes": 0})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.parametrize("limits", EVERYTHING_OLD)
def test_what_a_run_at_work_used_days_ago_stays(store: Store, limits: dict[str, float]) -> None:
    store.commit("baseline", 2)
    store.use("a run", "baseline", "rl_round", days=2)
    store.half_trained("rl_round", 0)
    assert store.collect(**limits) == []
    assert {stage.needed_by for stage in store.survey().stays} == {"run a run may be at work"}


@pytest.mark.parametrize("limits", EVERYTHING_OLD)
def test_it_stays_while_somebody_only_waits_for_a_job(
    store: Store, limits: dict[str, float]
) -> None:
    store.commit("baseline", 2)
    store.use("a run", "baseline", "queued", days=2)
    store.half_trained("queued", 2)
    store.storage.attempts.join(fp("queued"), "waits")
    assert store.collect(**limits) == []


@pytest.mark.parametrize("limits", EVERYTHING_OLD)
def test_it_stays_between_two_stages(store: Store, limits: dict[str, float]) -> None:
    store.commit("baseline", 2)
    store.commit("rl_round", 0)
    store.use("a run", "baseline", "rl_round", days=2)
    assert store.collect(**limits) == []


def test_a_run_of_which_nothing_is_heard_needs_nothing(store: Store) -> None:
    store.commit("baseline", 2)
    store.half_trained("rl_round", 2)
    store.use("a run", "baseline", "rl_round", days=2)
    assert set(store.collect(unused_s=DAY_S)) == {fp("baseline"), fp("rl_round")}


def by_path(model: Artifact) -> Artifact:
    return external_artifact(Path(model.uri))


def by_file(model: Artifact) -> Artifact:
    return external_artifact(Path(model.uri, "data.txt"))


@pytest.mark.parametrize("given", [by_path, by_file])
def test_a_model_of_the_store_that_is_read_by_its_path_stays(
    store: Store, given: Callable[[Artifact], Artifact]
) -> None:
    model = store.commit("merge", 40)
    store.half_trained("rl_round", 0, model=given(model))
    assert given(model).digest != model.digest
    assert store.collect() == []
    assert {stage.needed_by for stage in store.survey().stays} == {"sft reads it", ""}
    assert Path(model.uri).is_dir()


def test_what_a_job_goes_on_to_read_stays(store: Store) -> None:
    problems, model = store.commit("problems", 40), store.commit("merge", 40)
    then = store.specification("evaluate", 0, {"problems": problems, "model": by_path(model)})
    store.half_trained("rl_round", 0, then)
    assert store.collect() == []
    assert store.has("problems")
    assert store.has("merge")


@pytest.mark.parametrize("is_named", [True, False])
def test_a_run_that_is_kept_keeps_what_it_reads_of_others(store: Store, is_named: bool) -> None:
    model = store.commit("merge", 40)
    if not is_named:
        store.storage.inventory.remove_unless(f"stages/{fp('merge')}", lambda _: False)
    key = store.use("a run", days=35, reads=model)
    store.storage.runs.keep(key, True)
    assert store.collect() == []
    assert Path(model.uri).is_dir()
    store.storage.runs.keep(key, False)
    store.collect()
    assert not Path(model.uri).exists()
    assert store.storage.runs.known() == []


@pytest.mark.parametrize("is_named", [True, False])
def test_what_a_run_read_lately_stays(store: Store, is_named: bool) -> None:
    model = store.commit("merge", 40)
    if not is_named:
        store.storage.inventory.remove_unless(f"stages/{fp('merge')}", lambda _: False)
    store.use("a run", days=5, reads=model)
    assert store.collect() == []
    assert Path(model.uri).is_dir()


def test_a_run_that_begins_to_read_meanwhile_keeps_it(store: Store) -> None:
    model = store.commit("merge", 40)
    found = store.survey()
    store.use("a run", reads=model)
    collect(store.storage, store.inventory, found)
    assert store.has("merge")
    [run] = store.storage.runs.known()
    assert (run.name, {*run.read_at}, run.used_at) == ("a run", {model.digest}, {})


def test_a_run_that_goes_on_meanwhile_keeps_all_that_is_its(store: Store) -> None:
    store.commit("baseline", 40)
    store.commit("other", 40)
    store.use("a run", "baseline", days=35)
    found = store.survey()
    assert {stage.fingerprint for stage in found.goes} == {fp("baseline"), fp("other")}
    store.use("a run", "rl_round")
    collect(store.storage, store.inventory, found)
    assert store.has("baseline")
    assert not store.has("other")


def test_a_stage_that_is_committed_meanwhile_stays(store: Store) -> None:
    store.half_trained("sft", 40)
    found = store.survey()
    assert [stage.fingerprint for stage in found.goes] == [fp("sft")]
    store.commit("sft")
    collect(store.storage, store.inventory, found)
    assert store.has("sft")


def test_where_an_artifact_lies_tells_its_digest() -> None:
    digest = "0f" * 32
    for path in (f"/home/store/artifacts/model/{digest}", f"/c/artifacts/model/{digest}/a/b"):
        assert digest_in_path(path) == digest
    for path in (f"/artifacts/{digest}", f"/artifacts/model/{digest}0", "", "org/model"):
        assert digest_in_path(path) is None


def test_what_is_as_old_as_the_rest_is_told_by_use_alone(store: Store) -> None:
    """A run's own mark, and not the age of what it reads, says that somebody may be at work."""
    model = store.commit("merge", 40)
    key = store.use("a run", days=0.5, reads=model)
    assert [stage.needed_by for stage in store.survey().stays] == ["run a run may be at work"]
    set_age(store.root / "store/runs" / key / "artifacts" / model.digest, 31)
    assert store.collect() == [fp("merge")]
