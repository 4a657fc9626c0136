"""Answers that are kept: by whom they are found, and what a store does that takes or gives none."""

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf.testing.fault_proxy import FaultProxy, fault_proxy
from rlhf.testing.s3_server import BUCKET, environment, s3_server

from engines.config.stages.final import EvaluateStageConfig
from engines.jobs.serving.answers import ANSWERS, KeptAnswers
from engines.types import Completion, RolloutRequest, SamplingParams
from infra import faults
from infra.errors import StoreError
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Attempt, Holder, StageLogs
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import Storage, open_storage

GREEDY, SAMPLED = (
    [RolloutRequest(f"{kind}/{i}", (i, 2), SamplingParams(4), seeds) for i in range(3)]
    for kind, seeds in (("greedy", (1,)), ("sampled", (1, 2)))
)
NUM_GREEDY, NUM_SAMPLED = 3, 6
CONFIG = {"evaluation": {"max_new_tokens": 4}, "rollout": {}, "reward": {"function": "exact"}}

Answers = list[list[Completion]]


def sample(requests: Sequence[RolloutRequest]) -> Answers:
    """What an engine that repeats would say: each token from the request and its seed."""

    def one(request: RolloutRequest, index: int) -> Completion:
        drawn = hashlib.sha256(f"{request.request_id}/{request.seeds[index]}".encode()).digest()
        return Completion(
            request.request_id, index, tuple(drawn[:4]), (-0.5,) * 4, (0,) * 4, "stop"
        )

    return [[one(request, index) for index in range(request.num_samples)] for request in requests]


class Killed(BaseException):
    """The end of a process, as far as the code under test sees it."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultProxy]:
    with s3_server() as address, fault_proxy(address) as running:
        yield running


@pytest.fixture(params=["directory", "bucket"])
def uri(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Of a store that nobody used."""
    if request.param == "directory":
        yield str(tmp_path / "store")
        return
    proxy: FaultProxy = request.getfixturevalue("bucket")
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for name, value in environment(proxy.address).items():
        monkeypatch.setenv(name, value)
    yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
    proxy.heal()


class Stage:
    """An evaluation of one model, asked for as often as a test says.

    Args:
        uri: of the store.
        root: for its attempts.
        name: of it and of whoever asks for it, unlike any other's.
    """

    def __init__(self, uri: str, root: Path, name: str) -> None:
        self.uri, self.root, self.name = uri, root, name
        self.storage: Storage = open_storage(uri)

    def attempt(
        self,
        generate: Callable[[Sequence[RolloutRequest]], Answers] = sample,
        *,
        force: str = "",
        reward: str = "exact",
    ) -> KeptAnswers:
        """The next attempt."""
        fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        holder = Holder(id=self.name, process=own_stamp())
        number = len(self.storage.attempts.entries(fingerprint))
        self.storage.attempts.hold(fingerprint, holder, number, force)
        config = {**CONFIG, "reward": {"function": reward}}
        spec = StageSpec(
            stage="evaluate",
            job_module="engines.jobs.evaluate",
            fingerprint=fingerprint,
            attempt=number,
            holder=holder.id,
            config=config,
            inputs={},
            seed=0,
            store_uri=self.uri,
        )
        directory = self.root / self.name / str(number)
        directory.mkdir(parents=True)
        context: Any = SimpleNamespace(
            spec=spec,
            config=EvaluateStageConfig.model_validate(config),
            storage=self.storage,
            attempt_dir=directory,
        )
        return KeptAnswers(context, generate)

    def commit(self) -> None:
        """The end of the newest attempt."""
        fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        number = len(self.storage.attempts.entries(fingerprint)) - 1
        output = self.root / self.name / "output"
        output.mkdir()
        (output / "metrics.json").write_text("{}")
        record = CommitRecord(
            fingerprint=fingerprint,
            stage="evaluate",
            artifact=self.storage.publish(output, "evaluation"),
            attempt=number,
            committed_at="now",
        )
        self.storage.commit(Attempt(fingerprint, number, self.name), record)


@pytest.fixture
def stage(uri: str, tmp_path: Path) -> Callable[[str], Stage]:
    return lambda name: Stage(uri, tmp_path / "attempts", name)


def entries(stage: Stage) -> list[str]:
    """Kinds of the entries of the only answers that the store knows."""
    evaluations = {hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "c")}
    [fingerprint] = {*stage.storage.inventory.stages()} - evaluations
    return [entry.kind for entry in stage.storage.attempts.entries(fingerprint)]


def test_what_one_kept_another_finds_on_another_machine(
    stage: Callable[[str], Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stage("a").attempt()
    assert first(GREEDY) == sample(GREEDY)
    assert (first.num_found, first.num_sampled) == (0, NUM_GREEDY)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "other home"))
    other = stage("b").attempt(reward="math")
    assert other(GREEDY) == sample(GREEDY)
    assert other(SAMPLED) == sample(SAMPLED)
    assert (other.num_found, other.num_sampled) == (NUM_GREEDY, NUM_SAMPLED)


@pytest.mark.parametrize("moment", ["sampling", "hold", "commit"])
def test_repeat_of_a_killed_evaluation_samples_only_the_rest(
    stage: Callable[[str], Stage], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise Killed

    def killed_later(requests: Sequence[RolloutRequest]) -> Answers:
        return killed() if moment == "sampling" and requests is SAMPLED else sample(requests)

    answers = stage("a").attempt(killed_later)
    assert answers(GREEDY) == sample(GREEDY)
    with monkeypatch.context() as patched:
        if moment != "sampling":
            patched.setattr(StageLogs, moment, killed)
        with pytest.raises(Killed):
            answers(SAMPLED)
    again = stage("a").attempt()
    assert [*again(GREEDY), *again(SAMPLED)] == sample([*GREEDY, *SAMPLED])
    assert (again.num_found, again.num_sampled) == (NUM_GREEDY, NUM_SAMPLED)
    last = stage("b").attempt()
    last(SAMPLED)
    assert last.num_found == NUM_SAMPLED


def test_forced_evaluation_and_its_repeat_sample_everything(
    stage: Callable[[str], Stage],
) -> None:
    evaluation = stage("a")
    evaluation.attempt()(GREEDY)
    evaluation.commit()
    for force in ("again", ""):
        forced = evaluation.attempt(force=force)
        assert forced(GREEDY) == sample(GREEDY)
        assert (forced.num_found, forced.num_sampled) == (0, NUM_GREEDY)
    assert entries(evaluation) == ["held", "committed"], "equal answers are kept once"


@pytest.mark.parametrize("moment", ["sampling", "hold", "commit"])
def test_of_two_that_keep_equal_answers_at_once_both_end_well(
    stage: Callable[[str], Stage], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another evaluation does all of it in the middle of what the first one does."""
    other, started = stage("b").attempt(), list[bool]()

    def let_other_go_first() -> None:
        if not started:
            started.append(True)
            assert other(GREEDY) == sample(GREEDY)

    def slowly(requests: Sequence[RolloutRequest]) -> Answers:
        if moment == "sampling":
            let_other_go_first()
        return sample(requests)

    evaluation = stage("a")
    answers = evaluation.attempt(slowly)
    if moment != "sampling":
        plain = getattr(StageLogs, moment)

        def late(logs: StageLogs, *arguments: Any, **options: Any) -> Any:
            let_other_go_first()
            return plain(logs, *arguments, **options)

        monkeypatch.setattr(StageLogs, moment, late)
    assert answers(GREEDY) == sample(GREEDY)
    assert (answers.num_sampled, other.num_sampled) == (NUM_GREEDY, NUM_GREEDY)
    found = stage("c").attempt()
    assert found(GREEDY) == sample(GREEDY)
    assert found.num_found == NUM_GREEDY
    assert entries(evaluation).count("committed") == 1


REFUSALS = [
    pytest.param("storage.before_publish=enospc", id="full before the files"),
    pytest.param("artifacts.before_manifest=enospc", id="full before the manifest"),
    pytest.param("stage_log.before_hold=eio", id="a broken log"),
    pytest.param("storage.before_commit=enospc", id="full before the commit"),
    pytest.param("storage.before_commit=raise", id="a failed store"),
]


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_store_that_cannot_keep_them_ends_no_evaluation(
    stage: Callable[[str], Stage],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = stage("a").attempt()
    monkeypatch.setattr(faults, "_passes", Counter())
    monkeypatch.setenv("RLHF_FAULTS", fault)
    assert answers(GREEDY) == sample(GREEDY)
    said_once(caplog, "answers are not kept for another evaluation: ")
    assert not list(answers._context.attempt_dir.iterdir()), "nothing stays in the way"
    # What it left in the log is in nobody's way.
    for name, num_found in (("b", 0), ("c", NUM_GREEDY)):
        other = stage(name).attempt()
        assert other(GREEDY) == sample(GREEDY)
        assert other.num_found == num_found


@pytest.mark.parametrize("part", ["/artifacts/answers/", "/stages/"])
@pytest.mark.parametrize("uri", ["bucket"], indirect=True)
def test_a_bucket_that_may_only_be_read_ends_no_evaluation(
    stage: Callable[[str], Stage], bucket: FaultProxy, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage("a").attempt()(GREEDY)
    answers = stage("b").attempt()
    bucket.fail(403, "PUT", part, times=99)
    assert answers(GREEDY) == sample(GREEDY)
    assert answers(SAMPLED) == sample(SAMPLED)
    assert (answers.num_found, answers.num_sampled) == (NUM_GREEDY, NUM_SAMPLED)
    said = said_once(caplog, "answers are not kept for another evaluation: ")
    assert "answers 403 AccessDenied; let these credentials" in said


@pytest.mark.parametrize("uri", ["bucket"], indirect=True)
def test_answers_that_a_bucket_does_not_give_are_sampled(
    stage: Callable[[str], Stage],
    bucket: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage("a").attempt()(GREEDY)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "other home"))
    answers = stage("b").attempt()
    bucket.fail(403, "GET", f"/artifacts/{ANSWERS}/", times=99)
    assert answers(GREEDY) == sample(GREEDY)
    assert answers.num_sampled == NUM_GREEDY
    said = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert len(said) == 1
    assert "\n" not in said[0]


@pytest.mark.parametrize("uri", ["bucket"], indirect=True)
def test_a_bucket_that_answers_nobody_is_one_line(
    stage: Callable[[str], Stage], bucket: FaultProxy
) -> None:
    evaluation = stage("a")
    evaluation.attempt()
    bucket.fail("cut request", "GET", "/", times=999)
    with pytest.raises(StoreError, match="does not answer .*; see that it runs") as found:
        evaluation.attempt()
    assert "\n" not in str(found.value)


def said_once(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The one warning with a text, in one line."""
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith(text)]
    assert len(said) == 1, said
    assert "\n" not in said[0]
    return said[0]
