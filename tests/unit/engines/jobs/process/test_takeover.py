"""A stage that is taken over while its owner sleeps: the owner wakes, and costs no metric."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from infra import env
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.journal import read_journal

ROOT = Path(__file__).resolve().parents[5]
FINGERPRINT = "ab" * 32
NUM_STEPS = 12
OWNER, OTHER = "owner", "other"


class Counting:
    """A stage, and processes that count in it."""

    def __init__(self, root: Path) -> None:
        self.storage = LocalStorage(root)
        self.channel = self.storage.channel(FINGERPRINT)
        self.checkpoints = StepCheckpoints(self.channel.steps_dir(0), 2)

    def hold(self, attempt: int, holder: str) -> None:
        """Claim the next attempt."""
        self.storage.attempts.hold(FINGERPRINT, Holder(id=holder, process="elsewhere"), attempt)

    def run(self, attempt: int, holder: str, **environment: str) -> int:
        """The job of a held attempt; its exit code."""
        spec = StageSpec(
            stage="promote",
            job_module="stepping_job",
            fingerprint=FINGERPRINT,
            attempt=attempt,
            holder=holder,
            config={"promote": {}},
            inputs={},
            seed=0,
            store_uri=self.storage.uri,
            runtime={},
        )
        self.channel.write_specification(spec)
        program = Path(__file__).with_name("stepping_job.py")
        return subprocess.run(
            [sys.executable, program, self.storage.uri, FINGERPRINT, str(attempt)],
            timeout=120,
            check=False,
            env=env.child_environment(
                PYTHONPATH=str(ROOT), NUM_STEPS=str(NUM_STEPS), **environment
            ),
        ).returncode

    def steps(self) -> Counter[int]:
        """How often each step has metrics."""
        records, _ = read_journal(self.storage, FINGERPRINT)
        return Counter(record.step for record in records if record.step is not None)

    def begun(self) -> set[float]:
        """After which steps the attempts began whose metrics count."""
        records, _ = read_journal(self.storage, FINGERPRINT)
        return {record.values["begun"] for record in records if record.values}


@pytest.fixture
def stage(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "store")


ONCE_EACH = dict.fromkeys(range(1, NUM_STEPS + 1), 1)


@pytest.mark.parametrize("saves", ["waiting", pytest.param("background", marks=pytest.mark.slow)])
def test_a_woken_owner_ends_at_its_next_checkpoint(stage: Counting, saves: str) -> None:
    stage.hold(0, OWNER)
    assert stage.run(0, OWNER, TAKEN_AFTER="5", SAVES=saves) == 1
    assert stage.checkpoints.steps() == [5]
    problem = stage.channel.read_error(0)
    assert problem is not None
    assert problem.type == "FencedError"
    assert stage.run(1, OTHER) == 0
    assert stage.steps() == ONCE_EACH
    assert stage.begun() == {0.0, 5.0}


@pytest.mark.slow
def test_step_saved_by_old_owner_after_takeover_is_ignored(stage: Counting) -> None:
    """It asked before the stage was taken over, and published afterwards."""
    stage.hold(0, OWNER)
    stage.run(0, OWNER, TAKEN_AFTER="5")
    stage.checkpoints.save(
        10, lambda path: (path / "state.txt").write_text("after step 10"), TrainerState(10)
    )
    assert stage.run(1, OTHER) == 0
    assert stage.steps() == ONCE_EACH
    assert stage.begun() == {0.0, 5.0}
