"""Curves of training: stages laid end to end, each step once however often it was recorded."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from flows.report.plots import Curve, PairCurves, median_step, pair_curves, run_on
from infra.store.stage_log import Holder
from infra.store.stage_spec import Adoption
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, JournalRecord, StageHistory, read_journal

LOOKS = {0: (0.5, 0.4, 0.6), 2: (0.75, 0.6, 0.9)}
"""Held-out pair accuracy with its interval, after a step."""
ITERATION = PairCurves(
    accuracy=[Curve([1, 2], [0.5, 0.75], [], [], [])],
    held_out=[Curve([0, 2], [0.5, 0.75], [], [0.4, 0.6], [0.6, 0.9])],
    loss=[Curve([1, 2], [0.75, 0.5], [], [], [])],
    margin=[Curve([1, 2], [0.0, 0.25], [], [], [])],
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def segment(store: LocalStorage, stage: str, attempt: int, adopted: Adoption | None = None) -> Path:
    """The journal of an attempt that holds a stage from now on."""
    store.attempts.hold(stage, Holder(id=f"h{attempt}", process="p"), attempt, adopted=adopted)
    return store.channel(stage).local_dir(attempt) / "journal.jsonl"


def train(journal: Journal) -> None:
    """Two steps on pairs, as `SupervisedTrainer` records them."""
    look(journal, 0)
    for step in (1, 2):
        values = {"train/loss": 1 - 0.25 * step, "preference/accuracy": 0.25 + 0.25 * step}
        journal.metrics(step, {**values, "preference/margin": 0.25 * (step - 1)})
        journal.progress(step, 2, "a line for people")
    look(journal, 2)


def look(journal: Journal, step: int) -> None:
    names = ("pair_accuracy", "pair_accuracy_low", "pair_accuracy_high")
    found = dict(zip(names, LOOKS[step], strict=True))
    journal.metrics(step, {f"val-core/{name}": value for name, value in found.items()})


def records_of(store: LocalStorage, stage: str) -> list[JournalRecord]:
    return StageHistory(store).records(stage, "")[0]


def test_training_on_pairs(store: LocalStorage) -> None:
    with Journal(segment(store, "dpo", 0)) as journal:
        train(journal)
    assert pair_curves([records_of(store, "dpo")], "preference") == ITERATION
    rewards = pair_curves([records_of(store, "dpo")], "reward_model")
    assert not rewards.margin, "another trainer's"
    assert pair_curves([], "preference") == PairCurves([], [], [], [])


def test_iterations_follow_each_other_and_no_line_connects_them(store: LocalStorage) -> None:
    for stage in ("first", "second"):
        with Journal(segment(store, stage, 0)) as journal:
            train(journal)
    journals = [records_of(store, stage) for stage in ("first", "second")]
    found = pair_curves(journals, "preference")
    first, second = found.loss
    assert (first.steps, first.bounds) == ([1, 2], [])
    assert (second.steps, second.bounds) == ([3, 4], [3])
    assert second.values == first.values
    first, second = found.held_out
    assert first.steps == [0, 2]
    assert second.steps == [2, 4], "what the first ended with is what the second begins with"
    assert second.low == first.low == [0.4, 0.6]


def test_steps_that_an_attempt_repeats_are_no_further_points(store: LocalStorage) -> None:
    path = segment(store, "dpo", 0)
    with Journal(path) as journal:
        train(journal)
    earlier = records_of(store, "dpo")
    with Journal(segment(store, "dpo", 1), earlier) as journal:
        train(journal)
        journal.metrics(3, {"train/loss": 0.5})
    records = records_of(store, "dpo")
    assert pair_curves([records], "preference").loss[0].steps == [1, 2, 3]
    assert pair_curves([records], "preference").held_out[0].steps == [0, 2]
    # Even where two attempts wrote the same step, which a journal refuses.
    assert pair_curves([[*earlier, *earlier]], "preference") == ITERATION


def test_steps_that_were_adopted_come_once(store: LocalStorage) -> None:
    with Journal(segment(store, "theirs", 0)) as journal:
        train(journal)
    theirs, _ = read_journal(store, "theirs")
    origin = Adoption(fingerprint="theirs", generation=0, step=1, digest="d", differs=("x",))
    path = segment(store, "mine", 0, origin)
    with Journal(path) as journal:
        journal.copy(each for each in theirs if each.step is not None and each.step <= 1)
    with Journal(path) as journal:
        train(journal)
    assert pair_curves([records_of(store, "mine")], "preference") == ITERATION


def test_step_without_an_update_keeps_other_steps_in_place(store: LocalStorage) -> None:
    with Journal(segment(store, "dpo", 0)) as journal:
        journal.metrics(1, {"training/poisoned_updates": 1.0})
        journal.metrics(2, {"train/loss": 0.5})
        journal.metrics(3, {"training/poisoned_updates": 2.0})
    with Journal(segment(store, "next", 0)) as journal:
        journal.metrics(1, {"train/loss": 0.25})
    journals = [records_of(store, stage) for stage in ("dpo", "next")]
    first, second = pair_curves(journals, "preference").loss
    assert (first.steps, first.bounds) == ([2], [])
    assert (second.steps, second.bounds) == ([4], [4])


def test_distillation_goes_on_from_round_to_round(store: LocalStorage) -> None:
    """Rounds count on; of the first one step was skipped."""
    rounds = {"one": {1: 0.5, 3: 0.25}, "two": {4: 0.125}}
    for stage, values in rounds.items():
        with Journal(segment(store, stage, 0)) as journal:
            for step, value in values.items():
                journal.metrics(step, {"distillation/loss": value})
    found = run_on([records_of(store, stage) for stage in rounds], "distillation/loss")
    assert found == Curve([1, 2, 3], [0.5, 0.25, 0.125], [3])
    assert not run_on([], "distillation/loss").steps


def test_a_teacher_has_its_part_of_the_step(store: LocalStorage) -> None:
    timed: Mapping[str, float] = {
        "timing_s/gen": 1.0,
        "timing_s/ref": 1e-6,
        "timing_s/teacher": 2.0,
        "timing_s/update_critic": 3.0,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 10.5,
    }
    with Journal(segment(store, "round", 0)) as journal:
        journal.metrics(1, timed)
    found = median_step([records_of(store, "round")])
    assert list(found) == ["gen", "teacher", "update_critic", "update_actor", "other"]
    assert found["other"] == 0.5
    assert median_step([]) == {}
