"""Decisions about models, told in whatever order: the registry ends as if told at once."""

import shutil

import pytest
from tracked_world import GONE, PARENT, STAGE, World, told

from infra.store.canonical import canonical_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.tracking.ledger import RunEntry
from infra.tracking.promotion import PROMOTION, Comparison, Decision
from infra.tracking.tracker import (
    Incumbent,
)


def decided(
    world: World, name: str, value: float, incumbent: Artifact | None = None, *, promoted: bool
) -> RunEntry:
    """A stage that decided about a model of that name."""
    directory = world.home / name
    directory.mkdir()
    (directory / "config.json").write_text(f'{{"name": "{name}"}}')
    model = world.history.storage.publish(directory, "model")
    comparison = None
    if incumbent is not None:
        comparison = Comparison(
            incumbent_digest=incumbent.digest, value=0.5, gain=value - 0.5, margin=0.1,
            confidence=0.95, num_problems=9,
        )  # fmt: skip
    decision = Decision(
        promoted=promoted, metric="accuracy", value=value, min_value=0.1, alias="champion",
        model_digest=model.digest, model_name="m", comparison=comparison,
    )  # fmt: skip
    inputs = {"model": model, **({"incumbent": incumbent} if incumbent else {})}
    output = world.publish(PROMOTION, decision_json=canonical_json(decision))
    shutil.rmtree(world.home / "out", ignore_errors=True)
    update = {"key": name + "0" * 63, "state": "FINISHED", "inputs": inputs, "output": output}
    return STAGE.model_copy(update=update)


def test_winner_and_loser_get_aliases_and_below_bar_gets_none(world: World) -> None:
    tracker = world.tracker
    first = decided(world, "a", 0.5, promoted=True)
    old = first.inputs["model"]
    told(world.shipper(), PARENT, first)
    told(world.shipper(), decided(world, "b", 0.55, old, promoted=False))
    told(world.shipper(), decided(world, "c", 0.05, old, promoted=False))
    champion, challenger = (tracker.incumbent("m", a) for a in ("champion", "challenger"))
    assert champion == Incumbent("1", old)
    assert challenger is not None
    assert challenger.version == "2"
    assert '"3"' not in tracker.path.read_text()
    better = decided(world, "d", 0.9, old, promoted=True)
    told(world.shipper(), better)
    assert tracker.incumbent("m", "champion") == Incumbent("3", better.inputs["model"], old)


def test_late_decision_takes_no_alias_from_a_later_champion(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first = decided(world, "a", 0.5, promoted=True)
    told(world.shipper(), PARENT, first)
    old = first.inputs["model"]
    late, better = (
        decided(world, name, value, old, promoted=True) for name, value in (("b", 0.7), ("c", 0.9))
    )
    told(world.shipper(), better)
    champion = world.tracker.incumbent("m", "champion")
    told(world.shipper(), late)
    assert world.tracker.incumbent("m", "champion") == champion
    loser = world.tracker.incumbent("m", "challenger")
    assert loser == Incumbent("3", late.inputs["model"])
    assert "version 2 of m became champion meanwhile" in caplog.text
    # Told again, as to a server that was told everything but the last answer.
    before = world.tracker.path.read_text().count('"model": "m"')
    told(world.shipper(), better.model_copy(update={"key": "e" + "0" * 63}))
    assert world.tracker.path.read_text().count('"model": "m"') == before


def test_of_models_told_late_the_last_committed_has_the_alias(world: World) -> None:
    """Whatever order the keys of the runs have."""
    world.tracker.away = True
    for number, key in ((1, "c"), (2, "b")):
        directory = world.home / f"model-{number}"
        directory.mkdir()
        (directory / "config.json").write_text(f'{{"number": {number}}}')
        model = world.history.storage.publish(directory, "model")
        decision = Decision(
            promoted=True, metric="accuracy", value=0.5, min_value=0.1, model_digest=model.digest,
            model_name=f"m{number}", alias="champion",
        )  # fmt: skip
        output = world.publish(PROMOTION, decision_json=canonical_json(decision))
        fingerprint = key * 64
        holder = Holder(id=key, process="test")
        attempt = world.history.storage.attempts.hold(fingerprint, holder, 0)
        record = CommitRecord(
            fingerprint=fingerprint, stage="promote", artifact=output, attempt=0,
            committed_at=f"2026-01-01T00:00:0{number}+00:00",
        )  # fmt: skip
        world.history.storage.commit(attempt, record)
        entry = STAGE.model_copy(
            update={
                "key": fingerprint, "fingerprint": fingerprint, "inputs": {"model": model},
                "parent": "", "owner": GONE,
            }
        )  # fmt: skip
        told(world.shipper(), entry)
    world.tracker.away = False
    shipper = world.shipper()
    shipper.begin()
    shipper.close(20)
    text = world.tracker.path.read_text()
    assert 0 < text.index('"model": "m1"') < text.index('"model": "m2"')
