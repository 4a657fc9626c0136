"""Adopting half-trained work: what may differ, what is refused, and what is told of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from engines.config.stages.base import Runtime
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError
from infra.ray.api import JobRequest
from infra.store.stage_log import Attempt, generation
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, read_journal
from tasks.runner import run as identity
from tasks.runner.earlier_work import HalfTrained, find_adoptable, half_trained, own_step
from tasks.runner.run import StageRequest, numeric_sources
from tasks.runner.submission import Submission

EDITED = "engines.trainers.progress"


class Jobs:
    """A job server that takes every job."""

    cluster_id = ""

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        return True


class Work:
    """A store, and stages that half-train in it without a job."""

    def __init__(self, root: Path) -> None:
        self.storage = LocalStorage(root)

    def submit(self, request: StageRequest, adopts: HalfTrained | None = None) -> int:
        """Claim the next attempt, and submit it; its number."""
        attempt = len(self.storage.attempts.entries(request.fingerprint))
        submission = Submission(
            request=request,
            storage=self.storage,
            runtime=Runtime(),
            metadata={},
            follower="me",
            run_key="a" * 64,
            adopts=adopts,
        )
        submission.submit(Jobs(), attempt, "")  # type: ignore[arg-type]
        return attempt

    def train(self, request: StageRequest, *steps: int, attempt: int = 0) -> None:
        """Record steps as an attempt's job does, with a checkpoint at each."""
        channel = self.storage.channel(request.fingerprint)
        first = generation(self.storage.attempts.entries(request.fingerprint), attempt)[0]
        earlier = read_journal(self.storage, request.fingerprint)[0]
        checkpoints = StepCheckpoints(channel.steps_dir(first.number, first.adopted), 2)
        with Journal(channel.local_dir(attempt) / "journal.jsonl", earlier) as journal:
            for step in steps:
                journal.metrics(
                    step + request.config.num_previous_steps, {"train/loss": 1.0 / step}
                )
                journal.progress(step, 10, f"step {step}/10")
                text = f"{step} of {request.fingerprint}"
                checkpoints.save(
                    step, lambda path, t=text: (path / "w").write_text(t), TrainerState(step)
                )

    def steps(self, request: StageRequest) -> list[int]:
        """Steps of the newest generation's metrics, as they were recorded."""
        records, _ = read_journal(self.storage, request.fingerprint)
        return [record.step for record in records if record.step is not None]

    def checkpoints(self, request: StageRequest) -> StepCheckpoints:
        """Of the newest generation."""
        first = generation(self.storage.attempts.entries(request.fingerprint))[0]
        channel = self.storage.channel(request.fingerprint)
        return StepCheckpoints(channel.steps_dir(first.number, first.adopted), 2)


def request(*overrides: str, stage: str = "sft", dataset: str = "d", seed: int = 0) -> StageRequest:
    recipe = load_recipe("quickstart", overrides)
    config = (
        SFTStageConfig.from_recipe(recipe)
        if stage == "sft"
        else RLRoundStageConfig.from_recipe(recipe, int(stage))
    )
    artifact = Artifact(kind="dataset", uri="/x", digest=dataset * 64)
    return StageRequest(config, {"dataset": artifact}, seed)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "store")


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def edited(roots: Sequence[str]) -> dict[str, str]:
        return {**numeric_sources(roots), EDITED: "edited"}

    return lambda: monkeypatch.setattr(identity, "numeric_sources", edited)


def half_train(work: Work, old: StageRequest, *steps: int) -> None:
    work.submit(old)
    work.train(old, *steps)


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        (["training.num_workers=2"], "training.num_workers 1 -> 2"),
        (["training.ulysses_size=2"], "training.num_workers 1 -> 2"),
        (["training.max_tokens_per_micro_batch=64"], "training.max_tokens_per_micro_batch"),
        (["training.gradient_checkpointing=true"], "training.gradient_checkpointing auto -> True"),
        (["training.num_threads=3"], "training.num_threads"),
        (["hardware.device_kind=another"], "hardware.device_kind"),
    ],
)
def test_bad_input_row_38_layout_or_memory_change_can_be_adopted(
    work: Work, overrides: list[str], differs: str
) -> None:
    half_train(work, request(), 5, 10)
    found = find_adoptable(work.storage, request(*overrides))
    assert found is not None
    assert found.step == 10
    assert any(each.startswith(differs) for each in found.differs)
    assert "can be adopted with --adopt sft" in found.offer("sft")


@pytest.mark.parametrize(
    "override",
    [
        "model.max_length=128",
        "model.architecture.num_layers=3",
        "sft.optimizer.lr=0.5",
        "sft.optimizer.weight_decay=0.5",
        "sft.num_steps=900",
        "sft.batch_size_sequences=4",
        "training.dtype=bfloat16",
        "training.lora={rank: 4}",
        "training.frozen_parameters=[model.embed_tokens.*]",
        "training.options={cpu_offload: true}",
    ],
)
def test_what_is_trained_is_refused_by_its_field(work: Work, override: str) -> None:
    half_train(work, request(), 5)
    field = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{field}: got .*; need .*, with which step 5 of "):
        find_adoptable(work.storage, request(override))
    assert field in half_trained(work.storage, request(override))[0].offer("sft")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("rl.algorithm.clip_ratio=0.1", "rl.algorithm.clip_ratio"),
        ("rl.group_size=4", "rl.group_size"),
        ("rl.sampling.temperature=0.7", "rl.sampling.temperature"),
        ("rl.reward.kwargs={ignore_case: true}", "rl.reward.kwargs"),
        ("rollout.dtype=bfloat16", "rollout.dtype"),
    ],
)
def test_another_algorithm_is_refused_by_its_field(work: Work, override: str, field: str) -> None:
    half_train(work, request(stage="1"), 5)
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        find_adoptable(work.storage, request(override, stage="1"))


def test_other_data_seed_or_round_is_not_adoptable(work: Work) -> None:
    half_train(work, request(), 5)
    with pytest.raises(ConfigError, match=r"^inputs.dataset: got eeeeeeeeeeee; need dddddddddddd"):
        find_adoptable(work.storage, request(dataset="e"))
    assert half_trained(work.storage, request(dataset="e"))[0].offer("sft") == ""
    with pytest.raises(ConfigError, match=r"^seed: got 1; need 0"):
        find_adoptable(work.storage, request(seed=1))
    half_train(work, request(stage="1"), 5)
    with pytest.raises(ConfigError, match=r"^--adopt: got 'rl_round_2'; need half-trained work"):
        find_adoptable(work.storage, request(stage="2"))


def test_settings_that_this_version_refuses_are_named(work: Work) -> None:
    old = request()
    half_train(work, old, 5)
    channel = work.storage.channel(old.fingerprint)
    spec = channel.read_specification(0)
    config = {**spec.config, "sft": {**spec.config["sft"], "num_steps": -1}}
    channel.write_specification(spec.model_copy(update={"config": config}))
    need = "a value that this version refuses, with which step 5 of .* was trained; run without"
    with pytest.raises(ConfigError, match=rf"^sft.num_steps: got another value; need {need}"):
        find_adoptable(work.storage, request("training.num_threads=3"))


def test_fault_row_26_diff_names_module_and_library_versions(
    work: Work, edit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_train(work, request(), 5)
    edit()
    versions = identity.installed_libraries(["torch"])
    monkeypatch.setattr(identity, "installed_libraries", lambda *_: {**versions, "peft": "99"})
    found = find_adoptable(work.storage, request())
    assert found is not None
    assert EDITED in found.differs
    assert any(each.startswith("peft ") and each.endswith("-> 99") for each in found.differs)


def test_new_work_starts_with_adopted_steps_and_logs_them_once(
    work: Work, edit: Callable[[], None]
) -> None:
    old = request()
    half_train(work, old, 1, 2, 3)
    channel = work.storage.channel(old.fingerprint)
    with Journal(
        channel.local_dir(0) / "journal.jsonl", read_journal(work.storage, old.fingerprint)[0]
    ) as journal:
        journal.metrics(4, {"train/loss": 4.0})  # killed before its checkpoint
    before = sorted(path.name for path in channel.local_dir(0).parent.rglob("*"))
    edit()
    new = request()
    assert new.fingerprint != old.fingerprint
    attempt = work.submit(new, find_adoptable(work.storage, new))
    assert work.steps(new) == [1, 2, 3]
    newest = work.checkpoints(new).latest_valid()
    assert newest is not None
    assert (newest.step, (newest.path / "w").read_text()) == (3, f"3 of {old.fingerprint}")
    work.train(new, 4, 5, 6, attempt=attempt)
    assert work.steps(new) == [1, 2, 3, 4, 5, 6]
    assert find_adoptable(work.storage, new) is None, "the same command goes on with its own"
    second = work.submit(new)
    assert work.steps(new) == [1, 2, 3, 4, 5, 6]
    spec = work.storage.channel(new.fingerprint).read_specification(second)
    assert spec.adopted is not None
    assert (spec.adopted.fingerprint, spec.adopted.step) == (old.fingerprint, 3)
    assert spec.adopted.differs == (EDITED,)
    messages = [
        r.message for r in read_journal(work.storage, new.fingerprint)[0] if r.kind == "log"
    ]
    assert messages == [f"adopted {spec.adopted}"]
    assert sorted(path.name for path in channel.local_dir(0).parent.rglob("*")) == before


def test_own_steps_begun_without_adoption_are_left_behind(
    work: Work, edit: Callable[[], None]
) -> None:
    half_train(work, request(), 1, 2, 3)
    edit()
    new = request()
    half_train(work, new, 1)
    attempt = work.submit(new, find_adoptable(work.storage, new))
    assert attempt == 1
    assert work.steps(new) == [1, 2, 3]
    newest = work.checkpoints(new).latest_valid()
    assert newest is not None
    assert newest.step == 3


def test_a_damaged_checkpoint_is_passed_over(work: Work, edit: Callable[[], None]) -> None:
    old = request()
    half_train(work, old, 1, 2)
    next(work.checkpoints(old)._root.glob("step-00000002/checkpoint/w")).write_text("damaged")
    edit()
    work.submit(request(), find_adoptable(work.storage, request()))
    assert work.steps(request()) == [1]


def test_a_checkpoint_behind_the_journal_is_passed_over(
    work: Work, edit: Callable[[], None]
) -> None:
    """An owner that was replaced may have published it: its metrics do not count."""
    old = request()
    half_train(work, old, 1, 2)
    work.checkpoints(old).save(5, lambda path: (path / "w").write_text("5"), TrainerState(5))
    assert own_step(work.storage, old) == 2
    edit()
    found = find_adoptable(work.storage, request())
    assert found is not None
    assert found.step == 2, "no more is offered than is taken"
    work.submit(request(), found)
    assert work.steps(request()) == [1, 2]
    newest = work.checkpoints(request()).latest_valid()
    assert newest is not None
    assert newest.step == 2


def test_committed_work_is_reused_or_not_there(
    work: Work, edit: Callable[[], None], tmp_path: Path
) -> None:
    old = request()
    half_train(work, old, 1, 2)
    entry = work.storage.attempts.entries(old.fingerprint)[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    work.storage.commit(
        Attempt(old.fingerprint, 0, entry.holder.id),
        CommitRecord(
            fingerprint=old.fingerprint, stage="sft", attempt=0,
            artifact=work.storage.publish(tmp_path / "out", "policy"),
            committed_at="2026-01-01T00:00:00+00:00",
        ),
    )  # fmt: skip
    edit()
    with pytest.raises(ConfigError, match=r"^--adopt: got 'sft'; need half-trained work"):
        find_adoptable(work.storage, request())


def test_steps_of_a_later_round_count_on(work: Work, edit: Callable[[], None]) -> None:
    old = request("rl.num_steps_per_round=10", stage="2")
    half_train(work, old, 1, 2)
    assert work.steps(old) == [11, 12]
    edit()
    new = request("rl.num_steps_per_round=10", stage="2")
    work.submit(new, find_adoptable(work.storage, new))
    assert work.steps(new) == [11, 12]
