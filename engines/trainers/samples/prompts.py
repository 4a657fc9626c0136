"""Which prompts an RL step samples, and with which seeds: pure functions of the step.

Promises: the requests of a step depend on (seed, round, step) alone, so a resumed run sends the
same ones, and no cursor is saved. Every step takes the next batch of one endless order over the
rows. With dynamic sampling the further batches of a step come from a second order of their own,
so that the first order still visits every row once per epoch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engines.config.rows.algorithm import ADVANTAGES
from engines.config.stages.rl import RLRoundStageConfig
from engines.data.order.training_order import VisitedRow, order_of
from engines.data.read.by_place import Made
from engines.data.read.examples import RLPrompt
from engines.data.read.rows import RLRow
from engines.trainers.samples.params import sampling_params
from engines.types import RolloutRequest
from engines.vision.processor import PromptImages

GREEDY_SCORES = "greedy_scores"
"""Row of an estimator that compares with the greedy answer."""


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one generation batch.

    Attributes:
        first_group: index of the first prompt within the RL step.
        rows: one row per prompt.
        requests: one request per prompt.
        greedy_requests: for each prompt its greedy answer; () where no part reads it.
    """

    first_group: int
    rows: tuple[RLRow, ...]
    requests: tuple[RolloutRequest, ...]
    greedy_requests: tuple[RolloutRequest, ...] = ()

    @property
    def all_requests(self) -> tuple[RolloutRequest, ...]:
        """What is asked for in one call."""
        return self.requests + self.greedy_requests

    @property
    def asked_rows(self) -> tuple[RLRow, ...]:
        """The row of each of `all_requests`."""
        return self.rows + self.rows[: len(self.greedy_requests)]


class PromptSource:
    """The prompts of a round.

    Args:
        prompts: the tokenized RL split.
        config: sizes, sampling and round.
        seed: of the run.
        images: of the prompts; None: they show none.
    """

    def __init__(
        self,
        prompts: Sequence[RLPrompt],
        config: RLRoundStageConfig,
        seed: int,
        images: PromptImages | None = None,
    ) -> None:
        self._prompts = prompts
        self.images = images
        self._config, self._round = config.rl, config.round
        self.seed = seed
        self._sampling = sampling_params(config.rl.sampling)
        estimator = ADVANTAGES.find(config.rl.algorithm.adv_estimator)
        self._greedy = GREEDY_SCORES in estimator.rows
        size = config.rl.batch_size_prompts
        rows = Made(prompts, _visited)
        self._num_refills = config.rl.algorithm.filter_groups.max_num_gen_batches - 1
        self._order = order_of(config.rl.order, rows, size, seed, path="rl.order")
        self._refill_order = order_of(
            config.rl.order,
            rows,
            size,
            derive_seed(seed, "refill"),
            path="rl.order",
            batches_per_step=max(1, self._num_refills),
        )

    def generation_batches(self, step: int) -> Iterator[PromptBatch]:
        """The batch of a step, and those that dynamic sampling may add.

        Args:
            step: 1-based over all rounds.

        Yields:
            PromptBatch: at most `filter_groups.max_num_gen_batches` of them.
        """
        yield self._batch(step, 0, self._order.batch(step - 1))
        for refill in range(self._num_refills):
            rows = self._refill_order.batch((step - 1) * self._num_refills + refill)
            yield self._batch(step, (refill + 1) * self._config.batch_size_prompts, rows)

    def epoch(self, step: int) -> float:
        """Passes over the rows, refills not counted, when `step` is done."""
        return self._order.epoch(step)

    def _batch(self, step: int, first_group: int, indices: Sequence[int]) -> PromptBatch:
        prompts = [self._prompts[index] for index in indices]
        name = f"round={self._round}/step={step}/prompt="
        requests = tuple(
            RolloutRequest(
                request_id=f"{name}{first_group + place}",
                prompt_ids=prompt.prompt_ids,
                sampling=self._sampling,
                seeds=sample_seeds(
                    self.seed, f"{name}{first_group + place}", self._config.group_size
                ),
                images=self.images.encoded(prompt.row) if self.images else (),
            )
            for place, prompt in enumerate(prompts)
        )
        rows = tuple(prompt.row for prompt in prompts)
        greedy = tuple(self._greedy_request(request) for request in requests if self._greedy)
        return PromptBatch(first_group, rows, requests, greedy)

    def _greedy_request(self, request: RolloutRequest) -> RolloutRequest:
        sampling = replace(self._sampling, temperature=0.0)
        name = f"{request.request_id}/greedy"
        return RolloutRequest(
            name, request.prompt_ids, sampling, request.seeds[:1], images=request.images
        )


def _visited(prompt: RLPrompt) -> VisitedRow:
    return VisitedRow(prompt.row.data_source, len(prompt.prompt_ids), prompt.row.extra_info)


def sample_seeds(seed: int, request_id: str, num_samples: int, turn: int = 0) -> tuple[int, ...]:
    """One seed per sample of a request.

    Args:
        seed: of the run.
        request_id: of the conversation, the same in every turn.
        num_samples: how many.
        turn: of the conversation, counted from 0; each has seeds of its own.

    Returns:
        The seeds, in the order of the samples.
    """
    behind = f"/turn={turn}" if turn else ""
    return tuple(derive_seed(seed, f"{request_id}/sample={i}{behind}") for i in range(num_samples))


def derive_seed(seed: int, name: str) -> int:
    """A seed of its own for a named use, in [0, 2^63)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
