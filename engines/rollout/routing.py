"""Which replica samples what, and what is sampled again when a replica is lost: rules of engines.

`ByPlace` is for an engine whose samples depend, in the last bits, on the batch they were computed
in: the same replica gets the same share, and a lost share is sampled again whole. `LeastLoaded`
is for engines that promise no such thing: whoever has least to do samples, the requests of a
session stay where their prefix is cached, and only what is missing is sampled again.
Neither knows what a replica is: they see places and how many samples are in flight there.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from engines.rollout.collect import Ledger, Request


@dataclass(frozen=True)
class Share(Generic[Request]):
    """What one replica samples, or says logprobs of, in one go.

    Attributes:
        requests: with different ids.
        home: place that it was made for.
    """

    requests: tuple[Request, ...]
    home: int

    @property
    def num_samples(self) -> int:
        """Samples of all requests."""
        return sum(request.num_samples for request in self.requests)


class Routing(Protocol[Request]):
    """The rule over one batch of requests."""

    @property
    def waiting(self) -> bool:
        """Whether something has no replica yet."""
        ...

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """What starts now, and where.

        Args:
            loads: samples in flight at each place that can serve.

        Returns:
            (place, share); they no longer wait.
        """
        ...

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """Let what is missing of a share wait again, as the rule says."""
        ...


class ByPlace(Generic[Request]):
    """Request i is sampled at place i mod N; one share at a time at each place.

    Args:
        requests: the batch.
        num_places: N, whether or not there is a replica at each of them now.
    """

    def __init__(self, requests: Sequence[Request], num_places: int) -> None:
        shares = [Share(tuple(requests[home::num_places]), home) for home in range(num_places)]
        self._waiting = [share for share in shares if share.requests]

    @property
    def waiting(self) -> bool:
        """See `Routing`."""
        return bool(self._waiting)

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """See `Routing`. A share whose place has no replica goes to one that is idle."""
        idle = {place for place, load in loads.items() if not load}
        homes = {share.home for share in self._waiting}
        free = sorted(idle - homes)
        taken: list[tuple[int, Share[Request]]] = []
        for share in self._waiting:
            if share.home in idle:
                taken.append((share.home, share))
            elif share.home not in loads and free:
                taken.append((free.pop(0), share))
        started = {share.home for _, share in taken}
        self._waiting = [share for share in self._waiting if share.home not in started]
        return taken

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """See `Routing`. Whole, since the rest alone would be another batch."""
        if ledger.missing(share.requests):
            self._waiting.append(share)


class LeastLoaded(Generic[Request]):
    """Each request goes to its session's place, or else to the one with least in flight.

    Args:
        requests: the batch.
        sessions: place of each session that was seen; kept from batch to batch by the caller.
    """

    def __init__(self, requests: Sequence[Request], sessions: MutableMapping[str, int]) -> None:
        self._waiting = list(requests)
        self._sessions = sessions

    @property
    def waiting(self) -> bool:
        """See `Routing`."""
        return bool(self._waiting)

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """See `Routing`. A session whose place has no replica moves."""
        if not loads:
            return []
        expected = dict(loads)
        shares: dict[int, list[Request]] = {}
        for request in self._waiting:
            place = self._place(request, expected)
            shares.setdefault(place, []).append(request)
            expected[place] += request.num_samples
        self._waiting = []
        return [(place, Share(tuple(found), place)) for place, found in sorted(shares.items())]

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """See `Routing`. Only the samples that did not arrive."""
        self._waiting += ledger.missing(share.requests)

    def _place(self, request: Request, loads: Mapping[int, int]) -> int:
        session = request.session
        if session is not None and self._sessions.get(session) in loads:
            return self._sessions[session]
        place = min(loads, key=lambda candidate: (loads[candidate], candidate))
        if session is not None:
            self._sessions[session] = place
        return place
