"""A worker group of Ray actors, one per rank, which also watches whether they live.

Promises: every call has a deadline; a rank that dies or whose heartbeat stops becomes a
`WorkerError` with the rank, its node (if there are several), the call and the last lines of its
log; after a hang each rank's log has the stacks of its threads; after such an error all ranks are
killed, so none waits in a collective for a dead peer. No rank starts before all have a place. The
operating system chooses the port of the process group's store on the machine of rank 0, so two
groups that start together cannot collide.
Does not restart ranks: the stage continues from its step checkpoints.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engines import remote_files
from engines.collectives import close_process_group, open_store
from engines.controller.placed_batches import Array, Share, TensorStore
from engines.controller.placement import (
    Pool,
    rank_addresses,
    rank_environments,
    this_node,
    use_interface_of,
)
from engines.controller.process_log import log_tail, log_to
from engines.controller.worker_group import (
    Dispatch,
    P,
    R,
    WorkerGroup,
    collect,
    dispatch_mode,
    equal_result,
    split_plan,
    take,
)
from engines.errors import WorkerError
from engines.remote_files import DiskAccess, access_for
from engines.types import TokenBatch
from infra.errors import DeadlineError, PipelineError, on_failure
from infra.host.stacks import ask_for_stacks
from infra.plugins import import_external_modules
from infra.store.heartbeat import BeatWatch, Heartbeat, read_beat

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""
Call = tuple[Arguments, Sequence[Any]]
"""Arguments, and references to the arrays of a `Share` among them."""

POLL_S = 0.5
NODE_SILENCE_S = 15.0
"""Heartbeat age at which a rank counts as dead if its node does not answer either."""
SETTLE_S = 2.0
"""Wait after the first failure, to find the rank that died among those that fail because of it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayGroupOptions:
    """Size, environment and deadlines of a group of actors.

    Attributes:
        log_dir: where each rank writes `rank-<r>.log` and its heartbeat.
        sees_all_devices: True if a rank sees all devices of its node; otherwise it has one.
        timeouts_s: deadlines by method name; `call_timeout_s` is for all others.
        start_timeout_s: deadline of each step of the start: the processes, the store, the join.
        silence_s: a rank with an older heartbeat counts as dead.
    """

    world_size: int
    backend: str
    num_threads: int
    log_dir: Path
    sees_all_devices: bool = False
    collective_timeout_s: float = 600.0
    call_timeout_s: float = 7200.0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    start_timeout_s: float = 180.0
    heartbeat_s: float = 1.0
    silence_s: float = 60.0

    def log_path(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.log_dir / f"rank-{rank}.log"

    def heartbeat_path(self, rank: int) -> Path:
        """Return the heartbeat file of a rank."""
        return self.log_dir / f"rank-{rank}.heartbeat"


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` over Ray actors. Ray must be connected.

    `factory` makes a rank's worker in its actor after the ranks have joined. `pool` begins with the
    ranks' places and is closed with the group.
    """

    def __init__(self, factory: Callable[[], Any], options: RayGroupOptions, pool: Pool) -> None:
        self._options = options
        self._pool = pool
        self._rank_places = pool.places(0, options.world_size)
        self._actors: list[Any] = []
        self.world_size = options.world_size
        self._data_parallel_ranks: list[int] = []
        self._tensors = TensorStore()
        self._watches = [
            BeatWatch(partial(read_beat, options.heartbeat_path(rank)))
            for rank in range(options.world_size)
        ]
        options.log_dir.mkdir(parents=True, exist_ok=True)
        with on_failure(lambda _: self._kill()):
            self._start(factory)

    def run(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `@dispatch` method on the ranks and return its collected result."""
        name = method.__name__
        if not self._actors:
            raise WorkerError(f"{name} was called on a closed group")
        mode = dispatch_mode(method)
        if mode in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            results = self._call_all(name, [((args, kwargs), ())], [0] * self.world_size)
            return results[0] if mode is Dispatch.RANK_ZERO else equal_result(name, "rank", results)
        whole, *rest = args
        places = (
            self._data_parallel_ranks if mode is Dispatch.SPLIT else list(range(self.world_size))
        )
        parts = split_plan(whole, max(places) + 1)
        shares: Sequence[tuple[Any, Sequence[Any]]] = (
            self._tensors.shares(whole, parts)
            if isinstance(whole, TokenBatch)
            else [(take(whole, items), ()) for items in parts]
        )
        calls = [(((share, *rest), kwargs), arrays) for share, arrays in shares]
        results = self._call_all(name, calls, places)
        return collect(whole, parts, [results[places.index(i)] for i in range(len(parts))])

    def place(self, batch: TokenBatch) -> TokenBatch:
        """Put a batch into the object store and return it as read from there."""
        return self._tensors.placed(batch)

    def close(self) -> None:
        """Let every rank free its resources, then end the actors."""
        if not self._actors:
            return
        try:
            self._await([actor.stop.remote() for actor in self._actors], "stop", 30.0)
        except (WorkerError, DeadlineError) as error:
            logger.warning("a rank did not stop by itself: %s", error)
        finally:
            self._kill()

    def _start(self, factory: Callable[[], Any]) -> None:
        import ray

        options, start_s, places = self._options, self._options.start_timeout_s, self._rank_places
        access = access_for([place.node for place in places], this_node(), options.log_dir)
        remote: Any = ray.remote(max_restarts=0, max_task_retries=0)(RankProcess)
        addresses = rank_addresses(self._pool, len(places))
        environments = rank_environments(places, sees_all_devices=options.sees_all_devices)
        for rank, place in enumerate(places):
            options.heartbeat_path(rank).unlink(missing_ok=True)
            threads = {"OMP_NUM_THREADS": str(options.num_threads)}
            variables = {**options.env_vars, **threads, **environments[rank]}
            actor = remote.options(runtime_env={"env_vars": variables}, **place.options)
            self._actors.append(actor.remote(rank, addresses[rank], options, access))
        # All start before any joins, so that a rank that does not start is reported as such and not
        # as a store timeout.
        actors = self._actors
        self._await([each.started.remote() for each in actors], "all ranks to start", start_s)
        ((host, port),) = self._await(
            [actors[0].open_store.remote()], "rank 0 to open its store", start_s
        )
        self._await(
            [each.join.remote(host, port) for each in actors],
            "all ranks to join the process group",
            start_s,
        )
        self._data_parallel_ranks = self._await(
            [each.build.remote(factory) for each in actors], "build", options.call_timeout_s
        )

    def _call_all(self, name: str, calls: Sequence[Call], places: Sequence[int]) -> list[Any]:
        """Send each rank the call of its place; shared arguments are put into Ray once."""
        import ray

        sent = [
            ray.put(arguments) if places.count(place) > 1 else arguments
            for place, (arguments, _) in enumerate(calls)
        ]
        refs = [
            actor.call.remote(name, sent[place], *calls[place][1])
            for actor, place in zip(self._actors, places, strict=True)
        ]
        options = self._options
        return self._await(refs, name, options.timeouts_s.get(name, options.call_timeout_s))

    def _await(self, refs: Sequence[Any], what: str, deadline_s: float) -> list[Any]:
        """Return results in rank order; all waiting for ranks happens here."""
        import ray
        from ray.exceptions import RayError

        pending = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        end = time.monotonic() + deadline_s
        while pending and time.monotonic() < end:
            ready, _ = ray.wait(list(pending), timeout=min(POLL_S, max(0.0, deadline_s)))
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    results[rank] = ray.get(ref, timeout=deadline_s)
                except RayError as error:
                    if not failures:
                        end = min(end, time.monotonic() + SETTLE_S)
                    failures[rank] = error
            silent = None if failures else self._silent_rank(pending.values())
            if silent is not None:
                self._ask_for_stacks()
                self._fail(what, *silent)
        if failures:
            self._raise(what, failures, all_answered=not pending)
        if pending:
            ranks = sorted(pending.values())
            self._ask_for_stacks()
            self._kill()
            on_ranks = f"{what} on rank {', '.join(map(str, ranks))}"
            raise DeadlineError(f"{on_ranks}{self._tail(ranks[0])}", deadline_s)
        return [results[rank] for rank in range(len(refs))]

    def _raise(self, what: str, failures: dict[int, Exception], *, all_answered: bool) -> None:
        """Raise the failure that caused the others: a death before an exception.

        After a `PipelineError` on ranks that all answered, the group stays usable.
        """
        from ray.exceptions import RayActorError

        deaths = {
            rank: error for rank, error in failures.items() if isinstance(error, RayActorError)
        }
        rank, error = next(iter((deaths or failures).items()))
        if deaths:
            self._fail(what, rank, "its process died", error)
        cause = getattr(error, "cause", error)
        if isinstance(cause, PipelineError):
            if not all_answered:
                self._kill()
            cause.add_note(f"raised on rank {rank} in {what}")
            raise cause from None
        self._fail(what, rank, f"{type(cause).__name__}: {cause}", error)

    def _fail(self, what: str, rank: int, problem: str, cause: Exception | None = None) -> None:
        tail = self._tail(rank)
        spans = len({place.node for place in self._rank_places}) > 1
        node = f" on node {self._rank_places[rank].address}" if spans else ""
        self._kill()
        raise WorkerError(
            f"rank {rank} of {self.world_size}{node} failed in {what}: {problem}{tail}"
        ) from cause

    def _silent_rank(self, ranks: Iterable[int]) -> tuple[int, str] | None:
        """Return a rank whose heartbeat stopped, and how; a rank that never beat is starting."""
        for rank in ranks:
            watch, silence_s = self._watches[rank], 0.0
            with suppress(OSError):  # a disk error here says nothing about the rank
                silence_s = watch.look()
            if watch.beat is None:
                continue
            if silence_s > self._options.silence_s:
                return rank, f"no heartbeat for {self._options.silence_s:g} s"
            # Ray takes a minute to notice that a machine lost power.
            if silence_s > NODE_SILENCE_S and not self._rank_places[rank].node_answers():
                return rank, f"no heartbeat for {NODE_SILENCE_S:g} s, and its node does not answer"
        return None

    def _ask_for_stacks(self) -> None:
        logger.warning("stacks of the ranks:\n%s", ask_for_stacks(self._options.log_dir))

    def _tail(self, rank: int) -> str:
        return log_tail(self._options.log_path(rank), f"rank {rank}")

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        self._tensors.clear()
        if actors:
            import ray

            for actor in actors:
                ray.kill(actor)
        self._pool.close()


class RankProcess:
    """Class of a rank's Ray actor; its methods run one at a time, in the order of the calls.

    The log file holds the worker's log and, after a crash, the Python stack of every thread.
    """

    def __init__(
        self, rank: int, address: str, options: RayGroupOptions, access: DiskAccess | None = None
    ) -> None:
        self._rank, self._address, self._options = rank, address, options
        disk = remote_files.use(access)
        log, beats = options.log_path(rank), options.heartbeat_path(rank)
        log_to(disk.local(log))
        self._worker: Any = None
        self._store: TCPStore | None = None
        torch.set_num_threads(options.num_threads)
        self._heartbeat = Heartbeat(disk.local(beats), options.heartbeat_s)
        self._heartbeat.__enter__()
        for path in (beats, log):
            disk.follow(path, options.heartbeat_s)

    def started(self) -> None:
        """Return, which shows that the process is up."""

    def open_store(self) -> tuple[str, int]:
        """Open the rendezvous store and return its host and port; called on rank 0 only."""
        host, timeout_s = self._address, self._options.collective_timeout_s
        self._store = open_store(self._options.world_size, timeout_s, host)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Join the default process group through the store of rank 0."""
        options, size = self._options, self._options.world_size
        logger.info("collectives over %s", use_interface_of(self._address))
        # Deadline of the rendezvous and of each collective.
        timeout = timedelta(seconds=options.collective_timeout_s)
        store = self._store or TCPStore(host, port, size, is_master=False, timeout=timeout)
        dist.init_process_group(
            options.backend, store=store, rank=self._rank, world_size=size, timeout=timeout
        )

    def build(self, factory: Callable[[], Any]) -> int:
        """Make and initialize the worker; return its data-parallel rank."""
        for broken in import_external_modules():
            logger.warning("%s", broken)
        # As in `engines.jobs.process.torch_setup`. A collection on one rank makes all others wait.
        gc.freeze()
        self._worker = factory()
        self._worker.initialize()
        return int(self._worker.data_parallel_rank)

    def call(self, name: str, arguments: Arguments, *arrays: Array) -> Any:
        """Call a method of the worker; a `Share` as first argument becomes a batch.

        Ray resolves the arrays before the call, so no wait with a deadline is needed here.
        """
        logger.info("%s", name)
        args, kwargs = arguments
        if args and isinstance(share := args[0], Share):
            args = (share.batch(arrays), *args[1:])
        return getattr(self._worker, name)(*args, **kwargs)

    def stop(self) -> None:
        """Free the worker and leave the process group."""
        if self._worker is not None:
            self._worker.close()
        close_process_group()
        self._heartbeat.__exit__(None, None, None)
