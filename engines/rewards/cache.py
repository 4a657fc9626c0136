"""Cache of scores for one stage, keyed by a digest of what the function sees of a sample.

Unscored samples are not kept. Assumes that the function is deterministic.
"""

import hashlib
import json
from collections import OrderedDict

from engines.rewards.base import Judging, Score, ScoreRequest, Unscored
from engines.rewards.forms import Form
from engines.rewards.worker import message_of


class ScoreCache:
    """LRU cache of at most `size` scores."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def find(self, key: bytes) -> Score | None:
        """Return the score with this digest, or None."""
        return self._scores.get(key)

    def keep(self, key: bytes, result: Score | Unscored) -> None:
        """Record a use of this digest; only a `Score` is stored."""
        if not isinstance(result, Score):
            return
        self._scores[key] = result
        self._scores.move_to_end(key)
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)


class CachedJudging:
    """Judging that passes on only unknown requests, equal ones (by `form`) once."""

    def __init__(self, cache: ScoreCache, form: Form, judging: Judging) -> None:
        self._cache, self._judging = cache, judging
        self._form: Form = form
        self._keys: list[bytes] = []
        self._known: dict[bytes, Score] = {}
        self._asked: dict[bytes, int] = {}

    def add(self, request: ScoreRequest) -> int:
        """See `Judging`."""
        key = _key(request, self._form)
        self._keys.append(key)
        if key not in self._known and key not in self._asked:
            known = self._cache.find(key)
            if known is None:
                self._asked[key] = self._judging.add(request)
            else:
                self._known[key] = known
        return len(self._keys) - 1

    def results(self) -> list[Score | Unscored]:
        """See `Judging`."""
        judged = self._judging.results()
        found: dict[bytes, Score | Unscored] = {
            **self._known,
            **{key: judged[number] for key, number in self._asked.items()},
        }
        for key in dict.fromkeys(self._keys):
            self._cache.keep(key, found[key])
        return [found[key] for key in self._keys]

    def close(self) -> None:
        """See `Judging`."""
        self._judging.close()


def _key(request: ScoreRequest, form: Form) -> bytes:
    return hashlib.sha256(json.dumps(message_of(request, form), sort_keys=True).encode()).digest()
