"""Choose the prompts and the seeds of an RL step, as pure functions of the step.

Promises: requests depend only on (seed, round, step), so a resumed run needs no cursor. Every step
takes the next batch of an endless order; refills of dynamic sampling come from a second order, so
that they do not advance the first one.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engines.config.rollout import SamplingConfig
from engines.config.rows import ADVANTAGES
from engines.config.stages.rl import RLRoundStageConfig
from engines.data.order import VisitedRow, order_of
from engines.data.read.examples import RLPrompt
from engines.data.read.lazy_sequence import Made
from engines.data.read.rows import RLRow
from engines.types import RolloutRequest, SamplingParams, StructuredOutput
from engines.vision.processor import PromptImages


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """Return the sampling parameters of a configuration."""
    structured = config.structured_output
    if structured is not None:
        # Keys are not sorted: their order is the order of the fields in the answer.
        schema = None if structured.json_schema is None else json.dumps(structured.json_schema)
        structured = StructuredOutput(schema, structured.regex, structured.choice)
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        structured_output=structured,
    )


GREEDY_SCORES = "greedy_scores"
"""Name of the batch row of greedy answers' rewards, for estimators that compare with them."""


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one generation batch, with one row and one request per prompt.

    `first_group` is the index of the first prompt within the RL step. `greedy_requests` has one per
    prompt, or none if no part reads greedy answers.
    """

    first_group: int
    rows: tuple[RLRow, ...]
    requests: tuple[RolloutRequest, ...]
    greedy_requests: tuple[RolloutRequest, ...] = ()

    @property
    def all_requests(self) -> tuple[RolloutRequest, ...]:
        """Requests of one generation call."""
        return self.requests + self.greedy_requests

    @property
    def asked_rows(self) -> tuple[RLRow, ...]:
        """The row of each of `all_requests`."""
        return self.rows + self.rows[: len(self.greedy_requests)]


class PromptSource:
    """Makes the generation batches of a round's steps; `images` is None for text-only prompts."""

    def __init__(
        self,
        prompts: Sequence[RLPrompt],
        config: RLRoundStageConfig,
        seed: int,
        images: PromptImages | None = None,
    ) -> None:
        self._prompts, self.images = prompts, images
        self._config, self._round = config.rl, config.round
        self.seed = seed
        self._sampling = sampling_params(config.rl.sampling)
        self._greedy = GREEDY_SCORES in ADVANTAGES.find(config.rl.algorithm.adv_estimator).rows
        size = config.rl.batch_size_prompts
        rows = Made(
            prompts,
            lambda each: VisitedRow(
                each.row.data_source, len(each.prompt_ids), each.row.extra_info
            ),
        )
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
        """Yield the batch of a step (1-based over all rounds), then the refill batches."""
        yield self._batch(step, 0, self._order.batch(step - 1))
        for refill in range(self._num_refills):
            rows = self._refill_order.batch((step - 1) * self._num_refills + refill)
            yield self._batch(step, (refill + 1) * self._config.batch_size_prompts, rows)

    def epoch(self, step: int) -> float:
        """Return the number of passes over the rows up to the end of `step`, without refills."""
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
        greedy = tuple(
            replace(
                request,
                request_id=f"{request.request_id}/greedy",
                sampling=replace(self._sampling, temperature=0.0),
                seeds=request.seeds[:1],
            )
            for request in requests
            if self._greedy
        )
        return PromptBatch(first_group, tuple(prompt.row for prompt in prompts), requests, greedy)


def sample_seeds(seed: int, request_id: str, num_samples: int, turn: int = 0) -> tuple[int, ...]:
    """Return one seed per sample; a 0-based `turn` of a conversation has its own seeds."""
    behind = f"/turn={turn}" if turn else ""
    return tuple(derive_seed(seed, f"{request_id}/sample={i}{behind}") for i in range(num_samples))


def derive_seed(seed: int, name: str) -> int:
    """Return a seed for a named use, in [0, 2^63)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
