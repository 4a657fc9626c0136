"""What of a store may go, and that taking it away harms nobody."""

from pathlib import Path

import pytest

from infra.faults import InjectedFaultError
from infra.garbage import DAY_S, Survey, collect
from tests.unit.infra.garbage.directory import Store, fp, set_age


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_only_long_unused_stages_go_with_all_their_files(store: Store) -> None:
    artifact = store.commit("old", 31)
    store.half_trained("given up", 31)
    store.commit("young", 29)
    assert set(store.collect()) == {fp("old"), fp("given up")}
    assert not store.has("old")
    assert store.has("young")
    assert not Path(artifact.uri).exists()
    left = {path.name for part in ("stages", "work") for path in store.root.glob(f"store/{part}/*")}
    assert left == {fp("young")}
    assert store.survey().total_bytes == sum(
        path.stat().st_size
        for part in ("stages", "artifacts")
        for path in (store.root / "store" / part).rglob("*")
        if path.is_file()
    )


def test_what_a_run_asked_for_lately_stays(store: Store) -> None:
    store.commit("asked for", 40)
    store.commit("long ago", 40)
    store.use("a run", "asked for", "long ago", days=35)
    store.use("another", "asked for", days=2)
    assert store.collect() == [fp("long ago")]
    # Of a run of which something is left all is known.
    assert [run.name for run in store.storage.runs.known()] == ["a run", "another"]
    assert store.collect(unused_s=DAY_S) == [fp("asked for")]
    assert store.storage.runs.known() == []


def test_a_run_that_is_kept_keeps_what_it_used(store: Store) -> None:
    store.commit("dear", 400)
    key = store.use("a run", "dear", days=400)
    store.storage.runs.keep(key, True)
    assert store.collect() == []
    assert [stage.needed_by for stage in store.survey().stays] == ["run a run is kept"]
    store.storage.runs.keep(key, False)
    assert store.collect() == [fp("dear")]


def test_the_model_that_an_alias_points_to_stays(store: Store) -> None:
    first, last, registered = (store.commit(name, 40) for name in ("first", "last", "elsewhere"))
    store.promote("gate 1", first, 1)
    store.promote("gate 2", last, 2)
    found = store.survey({registered.digest: "registered as m@champion"})
    assert {stage.fingerprint for stage in found.goes} == {*map(fp, ("first", "gate 1", "gate 2"))}
    assert {stage.needed_by for stage in found.stays} == {
        "last m@champion of a gate",
        "registered as m@champion",
    }


def test_a_decision_of_another_version_ends_no_collection(store: Store) -> None:
    first, last = (store.commit(name, 40) for name in ("first", "last"))
    store.promote("gate 1", first, 1)
    store.promote("gate 2", last, 2, text='{"verdict": "yes"}')
    found = store.survey()
    assert [stage.needed_by for stage in found.stays] == ["last m@champion of a gate"]


def test_an_artifact_stays_while_a_stage_names_it(store: Store) -> None:
    artifact = store.commit("one", 40, text="same")
    store.commit("two", 0, text="same")
    set_age(Path(artifact.uri), 40)
    assert store.collect() == [fp("one")]
    assert store.has("two")


def test_what_nobody_committed_stays_while_its_writer_may_live(store: Store) -> None:
    source = store.root / "out"
    source.mkdir()
    (source / "data.txt").write_text("published, and then the machine went down")
    artifact = store.storage.publish(source, "model")
    assert store.survey().artifacts == ()
    set_age(Path(artifact.uri), 31)
    store.collect()
    assert not Path(artifact.uri).exists()


def test_what_a_living_attempt_reads_stays(store: Store) -> None:
    data = store.commit("data", 40)
    attempt = store.half_trained("sft", 0, data=data)
    assert store.collect() == []
    assert [stage.needed_by for stage in store.survey().stays] == ["sft reads it", ""]
    set_age(store.storage.channel(fp("sft")).local_dir(attempt.number) / "spec.json", 31)
    store.age("sft", None, 31)
    assert set(store.collect()) == {fp("data"), fp("sft")}


def test_a_damaged_log_and_what_it_may_name_stay(store: Store) -> None:
    artifact = store.commit("damaged", 400)
    (store.root / "store/stages" / fp("damaged") / "1").write_text("{")
    store.age("damaged", artifact, 400)
    assert store.collect() == []
    assert Path(artifact.uri).is_dir()


def test_beyond_a_size_the_longest_unused_goes_first(store: Store) -> None:
    for number, days in enumerate((5, 20, 10, 0.5)):
        store.commit(str(number), days, num_bytes=1000)
    everything = store.survey().total_bytes
    assert store.survey(max_bytes=everything).goes == ()
    found = store.survey(max_bytes=everything - 1)
    assert [stage.fingerprint for stage in found.goes] == [fp("1")]
    # What was used within a day stays, however small the limit.
    assert store.collect(max_bytes=0) == [fp("1"), fp("2"), fp("0")]
    assert store.has("3")


def test_checkpoints_that_may_be_adopted_go_by_age_alone(store: Store) -> None:
    store.commit("old", 20)
    store.half_trained("half", 25)
    assert [stage.fingerprint for stage in store.survey(max_bytes=0).goes] == [fp("old")]
    half = [stage.fingerprint for stage in store.survey(unused_s=22 * DAY_S).goes]
    assert half == [fp("half")]


def test_shared_artifact_frees_nothing_until_last_stage_goes(store: Store) -> None:
    store.commit("one", 20, text="same", num_bytes=5000)
    store.commit("two", 10, text="same", num_bytes=5000)
    store.commit("other", 5, num_bytes=5000)
    for path in store.root.glob("store/artifacts/*/*"):
        set_age(path, 20)
    total = store.survey().total_bytes
    assert len(store.survey(max_bytes=total - 4000).goes) == 2


def test_leftover_steps_of_a_commit_and_temporary_files_go(store: Store) -> None:
    store.commit("done", 2)
    steps = store.storage.channel(fp("done")).steps_dir(0) / "step-00000001"
    steps.mkdir(parents=True)
    (steps / "weights").write_bytes(b"w" * 1000)
    store.half_trained("under way", 2)
    rest = store.root / "store/artifacts/model/.tmp-x-00000000.1.1-abc"
    rest.mkdir()
    set_age(rest, 2)
    assert store.collect() == []
    assert not steps.exists()
    assert not rest.exists()
    assert store.storage.channel(fp("under way")).steps_dir(0).exists()
    assert store.has("done")


def test_what_is_asked_for_in_the_meantime_comes_back(store: Store) -> None:
    store.commit("wanted", 40)
    store.commit("alone", 40)
    found = store.survey()
    store.use("a run", "wanted")
    done = collect(store.storage, store.inventory, found)
    assert done.spared == (f"stages/{fp('wanted')}", *_places(found, store, "wanted"))
    assert store.has("wanted")
    assert not store.has("alone")


def _places(found: Survey, store: Store, name: str) -> list[str]:
    record = store.storage.lookup(fp(name))
    assert record is not None
    return [stored.place for digest, stored in found.artifacts if digest == record.artifact.digest]


def test_what_is_published_again_in_the_meantime_stays(store: Store) -> None:
    store.commit("gone", 40, text="same")
    found = store.survey()
    store.commit("new", text="same")
    collect(store.storage, store.inventory, found)
    assert store.has("new")
    assert not store.has("gone")


def test_a_publisher_says_that_it_needs_what_is_there_already(store: Store) -> None:
    artifact = store.commit("gone", 40, text="same")
    found = store.survey()
    source = store.root / "out"
    source.mkdir()
    (source / "data.txt").write_text("same".ljust(100))
    assert store.storage.publish(source, "model").digest == artifact.digest
    # Its commit comes only now, after the collection.
    assert collect(store.storage, store.inventory, found).spared == (
        f"artifacts/model/{artifact.digest}",
    )
    store._commit("new", artifact)
    assert store.has("new")


@pytest.mark.parametrize("at_pass", [1, 2, 3])
def test_killed_collection_keeps_the_store_usable_and_resumes(
    store: Store, monkeypatch: pytest.MonkeyPatch, at_pass: int
) -> None:
    names = [f"stage {number}" for number in range(4)]
    for name in names:
        store.commit(name, 40)
        attempt = store.storage.channel(fp(name)).local_dir(0)
        (attempt / "spec.json").write_text("{}")
        store.age(name, None, 40)
    kills = 0
    while True:
        # Each setting counts its own passes.
        monkeypatch.setenv("RLHF_FAULTS", f"garbage.taken=raise:{kills}@{at_pass}")
        try:
            collect(store.storage, store.inventory, store.survey())
        except InjectedFaultError:
            kills += 1
        else:
            break
        for name in names:
            store.has(name)  # raises if half of it is there
    assert kills
    assert not any(store.has(name) for name in names)


def test_a_store_that_is_not_there_has_nothing(store: Store) -> None:
    found = store.survey()
    assert (found.total_bytes, found.freed_bytes, found.goes, found.stays) == (0, 0, (), ())
