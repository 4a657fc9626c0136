"""Scores of samples that come again: the same text of the same row, within one stage.

Promises: a bounded number of scores, the least recently asked for is forgotten first; what could
not be scored is asked for again. Whether a function judges a sample always alike is not known here.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.forms import Form
from engines.rewards.worker import message_of

Results = list[Score | Unscored]


class ScoreCache:
    """Keeps scores by the digest of what was judged.

    Args:
        size: scores kept at most.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def score(
        self,
        requests: Sequence[ScoreRequest],
        form: Form,
        judge: Callable[[Sequence[ScoreRequest]], Results],
    ) -> Results:
        """Judge what is not known; equal requests of one call are judged once.

        Args:
            requests: any number.
            form: of the function: what of a request it sees.
            judge: gives one result per request.

        Returns:
            One result per request, in order.
        """
        keys = [_key(request, form) for request in requests]
        unknown = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in self._scores
        }
        found: dict[bytes, Score | Unscored] = {
            key: self._scores[key] for key in keys if key in self._scores
        }
        found.update(zip(unknown, judge(list(unknown.values())), strict=True))
        for key in dict.fromkeys(keys):
            self._keep(key, found[key])
        return [found[key] for key in keys]

    def _keep(self, key: bytes, result: Score | Unscored) -> None:
        if not isinstance(result, Score):
            return
        self._scores[key] = result
        self._scores.move_to_end(key)
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)


def _key(request: ScoreRequest, form: Form) -> bytes:
    return hashlib.sha256(json.dumps(message_of(request, form), sort_keys=True).encode()).digest()
