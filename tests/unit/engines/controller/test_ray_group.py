"""Ranks as Ray actors on a real embedded cluster: order, equality with one rank, and every way
in which a rank can leave."""

import errno
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import Queueing, reserve
from engines.controller.ray_group import RayGroupOptions, RayWorkerGroup
from engines.controller.worker_group import Dispatch, InProcessGroup, dispatch
from engines.errors import NonFiniteError, WorkerError
from engines.training.spec import POLICY
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from infra.errors import DeadlineError
from infra.store.heartbeat import Beat, BeatWatch
from infra.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]

HANG_S = 60.0
"""Collectives would wait ten times as long for who has left."""
GroupFactory = Callable[..., RayWorkerGroup]


class Probe:
    """A worker that does what a test asks for."""

    def __init__(self, place_of_rank: Callable[[int], int] = lambda rank: rank) -> None:
        self.rank = dist.get_rank()
        self.data_parallel_rank = place_of_rank(self.rank)

    def initialize(self) -> None:
        logging.getLogger("probe").info("rank %d is up", self.rank)

    @dispatch(Dispatch.SPLIT)
    def tag(self, items: list[str], suffix: str) -> list[str]:
        return [f"{item}{suffix}{self.data_parallel_rank}" for item in items]

    @dispatch(Dispatch.ONE_TO_ALL)
    def repeated(self, text: str) -> str:
        return text

    @dispatch(Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        return f"digest of rank {self.rank // 2}"

    @dispatch(Dispatch.RANK_ZERO)
    def where(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    @dispatch(Dispatch.RANK_ZERO)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @dispatch(Dispatch.SHARD_PER_RANK)
    def tag_by_rank(self, items: list[str]) -> list[str]:
        return [f"{item}@{self.rank}" for item in items]

    @dispatch(Dispatch.ONE_TO_ALL)
    def leave(self, rank: int, how: str) -> None:
        """One rank leaves in a certain way while the others wait for it in a collective."""
        if self.rank == rank:
            if how == "own error":
                raise NonFiniteError("loss is nan")
            if how == "foreign error":
                raise ZeroDivisionError("by nothing")
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        dist.barrier()

    @dispatch(Dispatch.ONE_TO_ALL)
    def refuse(self, rank: int) -> None:
        """One rank raises, and keeps nobody waiting."""
        if self.rank == rank:
            raise NonFiniteError("loss is nan")

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[GroupFactory]:
    groups: list[RayWorkerGroup] = []

    def make(factory=Probe, world_size: int = 2, **changes) -> RayWorkerGroup:
        options = RayGroupOptions(
            world_size=world_size,
            backend="gloo",
            num_threads=1,
            log_dir=tmp_path / "ranks",
            **{"collective_timeout_s": 600.0, "heartbeat_s": 0.2, **changes},
        )
        queueing = Queueing(fit_deadline_s=options.start_timeout_s)
        pool = reserve([{"num_cpus": 1}] * world_size, queueing)
        groups.append(RayWorkerGroup(factory, options, pool))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_calls_are_spread_and_collected(start: GroupFactory) -> None:
    group = start()
    assert group.world_size == 2
    assert group.run(Probe.tag, ["a", "b", "c"], "@") == ["a@0", "b@1", "c@0"]
    assert group.run(Probe.where)[0] == 0
    group.close()
    group.close()
    with pytest.raises(WorkerError, match="where was called on a closed group"):
        group.run(Probe.where)


def test_ranks_of_one_place_get_the_same_share(start: GroupFactory) -> None:
    group = start(functools.partial(Probe, lambda rank: rank // 2), world_size=4)
    assert group.run(Probe.tag, ["a", "b", "c"], "@") == ["a@0", "b@1", "c@0"]
    assert group.run(Probe.tag_by_rank, ["a", "b", "c", "d"]) == ["a@0", "b@1", "c@2", "d@3"]


class Counted:
    """A string for the ranks, which counts how often it is pickled for them."""

    def __init__(self, text: str) -> None:
        self.text, self.num_pickled = text, 0

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.num_pickled += 1
        return str, (self.text,)


def test_what_several_ranks_get_is_pickled_once(start: GroupFactory) -> None:
    group = start(functools.partial(Probe, lambda rank: rank // 2), world_size=4)
    a, b, suffix = Counted("a"), Counted("b"), Counted("@")
    assert group.run(Probe.tag, [a, b], suffix) == ["a@0", "b@1"]
    assert (a.num_pickled, b.num_pickled, suffix.num_pickled) == (1, 1, 2)
    assert group.run(Probe.repeated, whole := Counted("w")) == "w"
    assert whole.num_pickled == 1


def test_ranks_that_must_agree_and_do_not_are_named(start: GroupFactory) -> None:
    agreeing = start()
    assert agreeing.run(Probe.digest) == "digest of rank 0"
    agreeing.close()  # the cluster has room for four ranks
    with pytest.raises(
        WorkerError, match="digest: rank 2 returned 'digest of rank 1', rank 0 'digest"
    ):
        start(world_size=3).run(Probe.digest)


def test_fault_row_3_dead_rank_is_named_with_log_and_others_end(
    start: GroupFactory, record_property: Callable[[str, object], None]
) -> None:
    group = start()
    pid = group.run(Probe.where)[1]
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed in leave: its process died") as died:
        group.run(Probe.leave, 1, "kill")
    took_s = time.monotonic() - begin
    record_property("F4", took_s)
    assert took_s < HANG_S
    assert "rank 1 | " in str(died.value)
    assert "rank 1 is up" in str(died.value)
    _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} to be gone", HANG_S)


def test_fault_row_4_a_stopped_rank_is_noticed_by_its_silence(
    start: GroupFactory, record_property: Callable[[str, object], None]
) -> None:
    group = start(silence_s=3.0)
    pid = group.run(Probe.where)[1]
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 0 of 2 failed in leave: no heartbeat for 3 s"):
        group.run(Probe.leave, 0, "stop")
    took_s = time.monotonic() - begin
    record_property("F4", max(0.0, took_s - 3.0))
    assert took_s < HANG_S
    _wait_until_gone(pid)


def test_a_disk_that_fails_the_watcher_makes_no_rank_look_dead() -> None:
    group = object.__new__(RayWorkerGroup)

    def broken() -> Beat:
        raise OSError(errno.EIO, "the disk of the beats")

    group._watches = [BeatWatch(broken), BeatWatch(broken)]
    assert group._silent_rank([0, 1]) is None


def test_an_error_of_ours_arrives_as_it_was_raised(start: GroupFactory) -> None:
    with pytest.raises(NonFiniteError, match="loss is nan") as raised:
        start().run(Probe.leave, 1, "own error")
    assert raised.value.__notes__ == ["raised on rank 1 in leave"]


def test_own_error_ends_ranks_only_if_another_rank_waits(
    start: GroupFactory,
) -> None:
    group = start()
    with pytest.raises(NonFiniteError):
        group.run(Probe.refuse, 0)
    assert group.run(Probe.where)[0] == 0
    with pytest.raises(NonFiniteError):
        group.run(Probe.leave, 0, "own error")
    with pytest.raises(WorkerError, match="closed group"):
        group.run(Probe.where)


def test_another_error_becomes_a_worker_error(start: GroupFactory) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed in leave: ZeroDivisionError: by n"):
        start().run(Probe.leave, 1, "foreign error")


def test_every_call_has_a_deadline(start: GroupFactory) -> None:
    group = start(timeouts_s={"sleep": 1.0})
    with pytest.raises(DeadlineError, match="gave up after 1 s waiting for sleep on rank 0, 1"):
        group.run(Probe.sleep, 60.0)
    for rank in (0, 1):
        log = group._options.log_path(rank).read_text()
        assert "in sleep" in log, "where it was when the deadline passed"


def test_fault_row_23_unplaceable_ranks_report_need_and_capacity(
    start: GroupFactory,
) -> None:
    with pytest.raises(
        DeadlineError,
        match=r"room for 9 x 1 CPU \(the cluster has 1 x \(4 CPU\)\): more than its nodes have",
    ):
        start(world_size=9, start_timeout_s=4.0)


def test_two_large_pools_are_reserved_one_after_the_other() -> None:
    """Neither holds a part of what the other waits for."""
    heard: list[str] = []
    num_waits: list[int] = []
    bundles = [{"num_cpus": 1}] * 3
    first = reserve(bundles)
    with ThreadPoolExecutor() as threads:
        told = Queueing(say=heard.append, waiting=lambda: num_waits.append(1))
        second = threads.submit(reserve, bundles, told)
        wait_for(lambda: len(num_waits) > 1, "the second pool to wait", HANG_S)
        assert heard[0].startswith("waits for room for 3 x 1 CPU (the cluster has 1 x (4 CPU))")
        # Had it taken the one CPU that is left, this one would not fit.
        reserve([{"num_cpus": 1}], Queueing(deadline_s=240.0)).close()
        first.close()
        second.result(timeout=60.0).close()


def test_a_pool_that_others_hold_is_given_up_by_its_deadline(start: GroupFactory) -> None:
    group = start(world_size=4)
    with pytest.raises(DeadlineError, match="gave up after 3 s waiting for room for 1 x 1 CPU"):
        reserve([{"num_cpus": 1}], Queueing(deadline_s=3.0))
    group.close()  # gives its places back
    pool = reserve([{"num_cpus": 1}] * 4, Queueing(deadline_s=240.0), on_this_node=0)
    assert [place.address for place in pool.places(0, 4)] == ["127.0.0.1"] * 4
    pool.close()


def test_single_node_group_store_listens_on_loopback_only(start: GroupFactory) -> None:
    _, pid = start().run(Probe.where)
    listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    assert listening
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


def test_two_ranks_train_and_sample_like_one(
    start: GroupFactory, policy_spec: WorkerSpec, tmp_path: Path
) -> None:
    """Losses to 1e-5, the same samples, and each world size loads the other's checkpoint."""
    spec = replace(
        policy_spec,
        roles={
            POLICY: replace(
                policy_spec.policy, training=TrainingConfig(num_threads=1, num_workers=2)
            )
        },
    )
    two = start(functools.partial(ModelWorker, spec))
    worker = ModelWorker(policy_spec)
    worker.initialize()
    one = InProcessGroup(worker)
    ids = [[(7 * i + t) % 13 + 4 for t in range(5 + i % 4)] for i in range(9)]
    batch = TokenBatch.from_sequences(ids, loss_mask=[[0, 0, *[1] * (len(x) - 2)] for x in ids])
    for _ in range(5):
        single = one.run(ModelWorker.train, batch, SupervisedLoss())
        double = two.run(ModelWorker.train, batch, SupervisedLoss())
        assert double.loss == pytest.approx(single.loss, abs=1e-5)
        assert double.grad_norm == pytest.approx(single.grad_norm, abs=1e-4)
        assert double.num_tokens == single.num_tokens
    assert one.run(ModelWorker.infer_logprobs, batch).tolist() == pytest.approx(
        two.run(ModelWorker.infer_logprobs, batch).tolist(), abs=1e-4
    )
    requests = [
        RolloutRequest(f"p{i}", tuple(range(4, 7 + i)), SamplingParams(6), (i, i + 50))
        for i in range(5)
    ]
    samples = []
    for group in (one, two):
        group.run(ModelWorker.sync_weights, 5)
        rows = group.run(ModelWorker.generate, requests)
        samples.append([completion.token_ids.tolist() for row in rows for completion in row])
    assert samples[0] == samples[1]
    # A batch with fewer sequences than ranks trains too.
    lone = batch.select([0])
    assert two.run(ModelWorker.train, lone, SupervisedLoss()).loss == pytest.approx(
        one.run(ModelWorker.train, lone, SupervisedLoss()).loss, abs=1e-5
    )
    for writer, reader in ((one, two), (two, one)):
        path = tmp_path / f"by-{writer.world_size}"
        path.mkdir()
        writer.run(ModelWorker.save_checkpoint, path, 6)
        assert reader.run(ModelWorker.load_checkpoint, path) == 6
        continued = [
            group.run(ModelWorker.train, batch, SupervisedLoss()).loss for group in (writer, reader)
        ]
        assert continued[0] == pytest.approx(continued[1], abs=1e-5)
    one.close()


def test_ranks_start_with_the_platforms_variables(start: GroupFactory) -> None:
    group = start(world_size=1, env_vars={"CHIP_MEMORY": "grows"})
    assert group.run(Probe.variable, "CHIP_MEMORY") == "grows"
    assert "CHIP_MEMORY" not in os.environ
