"""A worker group of Ray actors, one per rank, which also watches whether they live.

Promises: every call has a deadline; a rank that dies or whose heartbeat stops becomes a
`WorkerError` with the rank, its node, the call and the last lines of its log; after a hang each
rank's log has the stacks of its threads; after such an error all ranks are killed, so none waits in
a collective for a dead peer. No rank starts before all have a place.
Does not restart ranks: the stage continues from its step checkpoints.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate

from engines.controller.placed_batches import TensorStore
from engines.controller.placement import (
    Place,
    Pool,
    Queueing,
    reserve,
    seat_environment,
    seats,
    this_node,
)
from engines.controller.process_log import log_tail
from engines.controller.rank_process import Arguments, RankProcess, RayGroupOptions
from engines.controller.worker_group import (
    Dispatch,
    P,
    R,
    collect,
    dispatch_mode,
    equal_result,
    split_plan,
    take,
)
from engines.errors import WorkerError
from engines.remote_files import access_for
from engines.types import TokenBatch
from infra.errors import DeadlineError, PipelineError
from infra.host.stacks import ask_for_stacks
from infra.store.heartbeat import BeatWatch, read_beat

WorkerFactory = Callable[[], Any]
Call = tuple[Arguments, Sequence[Any]]
"""Arguments, and references to the arrays of a `Share` among them."""

POLL_S = 0.5
NODE_SILENCE_S = 15.0
"""Heartbeat age at which a rank counts as dead if its node does not answer either."""
SETTLE_S = 2.0
"""Wait after the first failure, to find the rank that died among those that fail because of it."""

logger = logging.getLogger(__name__)


class RayWorkerGroup:
    """A `WorkerGroup` over Ray actors. Ray must be connected.

    `factory` makes a rank's worker in its actor after the ranks have joined. `pool` holds the
    ranks' places first and is closed with the group; None reserves them.
    """

    def __init__(
        self, factory: WorkerFactory, options: RayGroupOptions, pool: Pool | None = None
    ) -> None:
        self._options = options
        self._pool = pool
        self._at: tuple[Place, ...] = ()
        self._actors: list[Any] = []
        self._places: list[int] = [0] * options.world_size
        self._tensors = TensorStore()
        self._watches = [
            BeatWatch(partial(read_beat, options.heartbeat_path(rank)))
            for rank in range(options.world_size)
        ]
        options.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._start(factory)
        except BaseException:
            self._kill()
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._options.world_size

    def run(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `@dispatch` method on the ranks and return its collected result."""
        name = method.__name__
        if not self._actors:
            raise WorkerError(f"{name} was called on a closed group")
        deadline_s = self._options.timeouts_s.get(name, self._options.call_timeout_s)
        mode = dispatch_mode(method)
        if mode in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            call = (args, kwargs), ()
            results = self._call_all(name, [call], [0] * self.world_size, deadline_s)
            return results[0] if mode is Dispatch.RANK_ZERO else equal_result(name, "rank", results)
        whole, *rest = args
        places = self._places if mode is Dispatch.SPLIT else list(range(self.world_size))
        parts = split_plan(whole, max(places) + 1)
        if isinstance(whole, TokenBatch):
            shares = self._tensors.shares(whole, parts)
        else:
            shares = [(take(whole, items), ()) for items in parts]
        calls = [(((share, *rest), kwargs), arrays) for share, arrays in shares]
        results = self._call_all(name, calls, places, deadline_s)
        first_ranks = [places.index(place) for place in range(len(parts))]
        return collect(whole, parts, [results[rank] for rank in first_ranks])

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

    def _start(self, factory: WorkerFactory) -> None:
        start_s = self._options.start_timeout_s
        self._start_actors()
        # All start before any joins, so that a rank that does not start is reported as such and not
        # as a store timeout.
        started = [actor.started.remote() for actor in self._actors]
        self._await(started, "all ranks to start", start_s)
        opened = [self._actors[0].open_store.remote()]
        (meeting,) = self._await(opened, "rank 0 to open its store", start_s)
        joined = [actor.join.remote(meeting) for actor in self._actors]
        self._await(joined, "all ranks to meet", start_s)
        built = [actor.build.remote(factory) for actor in self._actors]
        self._places = self._await(built, "build", self._options.call_timeout_s)

    def _start_actors(self) -> None:
        import ray

        options = self._options
        if self._pool is None:
            bundles = [options.resources] * options.world_size
            self._pool = reserve(bundles, Queueing(fit_deadline_s=options.start_timeout_s))
        self._at = places = self._pool.places(0, options.world_size)
        access = access_for([place.node for place in places], this_node(), options.log_dir)
        remote: Any = ray.remote(max_restarts=0, max_task_retries=0)(RankProcess)
        for seat, place in zip(seats(places), places, strict=True):
            options.heartbeat_path(seat.rank).unlink(missing_ok=True)
            environment = {
                "OMP_NUM_THREADS": str(options.num_threads),
                **seat_environment(seat, sees_all_devices=options.sees_all_devices),
            }
            self._actors.append(
                remote.options(runtime_env={"env_vars": environment}, **place.options).remote(
                    seat, options, access
                )
            )

    def _call_all(
        self, name: str, calls: Sequence[Call], places: Sequence[int], deadline_s: float
    ) -> list[Any]:
        """Send each rank the call of its place; shared arguments are put into Ray once."""
        import ray

        sent = [
            ray.put(arguments) if places.count(place) > 1 else arguments
            for place, (arguments, _) in enumerate(calls)
        ]
        ranks = zip(self._actors, places, strict=True)
        refs = [actor.call.remote(name, sent[place], *calls[place][1]) for actor, place in ranks]
        return self._await(refs, name, deadline_s)

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
            ranks = ", ".join(str(rank) for rank in sorted(pending.values()))
            self._ask_for_stacks()
            tail = self._tail(min(pending.values()))
            self._kill()
            raise DeadlineError(f"{what} on rank {ranks}{tail}", deadline_s)
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
        spans = len({place.node for place in self._at}) > 1
        node = f" on node {self._at[rank].address}" if spans else ""
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
            if silence_s > NODE_SILENCE_S and not self._at[rank].node_answers():
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
        if self._pool is not None:
            self._pool.close()
