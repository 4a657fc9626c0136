"""Rules that assign requests to replicas, also again after a replica is lost.

`ByPlace` is for engines whose samples depend, in the last bits, on their batch: the same replica
gets the same share, and a lost share is sampled again whole. `LeastLoaded` is for the others:
requests go to the least loaded replica or to their session's, and only missing samples are redone.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from engines.rollout.collect import Ledger, Request


@dataclass(frozen=True)
class Share(Generic[Request]):
    """Requests with distinct ids that one replica answers in one call, planned for place `home`."""

    requests: tuple[Request, ...]
    home: int

    @property
    def num_samples(self) -> int:
        """Number of samples of all requests."""
        return sum(request.num_samples for request in self.requests)


class Routing(Protocol[Request]):
    """Assignment of one batch of requests to replicas."""

    @property
    def waiting(self) -> bool:
        """True if requests are not assigned yet."""
        ...

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """Return (place, share) pairs to start now, given the samples in flight at each place."""
        ...

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """Let the missing part of a lost share wait again."""
        ...


class ByPlace(Generic[Request]):
    """Request i goes to place i mod `num_places`, running or not; one share per place at a time."""

    def __init__(self, requests: Sequence[Request], num_places: int) -> None:
        shares = [Share(tuple(requests[home::num_places]), home) for home in range(num_places)]
        self._waiting = [share for share in shares if share.requests]

    @property
    def waiting(self) -> bool:
        """See `Routing`."""
        return bool(self._waiting)

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """See `Routing`. A share whose place has no replica goes to an idle place."""
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
        """See `Routing`. The whole share waits again, since the rest alone is another batch."""
        if ledger.missing(share.requests):
            self._waiting.append(share)


class LeastLoaded(Generic[Request]):
    """Each request goes to its session's place, else to the place with the least in flight.

    The caller keeps `sessions`, the place of each known session, across batches.
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
        """See `Routing`. Only missing samples wait again."""
        self._waiting += ledger.missing(share.requests)

    def _place(self, request: Request, loads: Mapping[int, int]) -> int:
        session = request.session
        if session is not None and self._sessions.get(session) in loads:
            return self._sessions[session]
        place = min(loads, key=lambda candidate: (loads[candidate], candidate))
        if session is not None:
            self._sessions[session] = place
        return place
