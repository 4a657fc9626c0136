"""Pairs of answers, at least one of them sampled from the policy.

Promises: rows and seeds depend only on (seed, iteration, row). An answer that was cut, is blank or
could not be scored is in no pair; rows without a pair are counted. Lengths are those of the
rendered text, as training sees it.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from engines.config.rollout import SamplingConfig
from engines.data.order import ResumableOrder
from engines.data.read.examples import RLPrompt, pair_lengths
from engines.data.read.rows import PreferenceRow, RewardModel, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.rewards.base import Score
from engines.trainers.prompts import derive_seed, sample_seeds, sampling_params
from engines.types import Completion, RolloutRequest


@dataclass(frozen=True)
class OwnAnswer:
    """An answer of the policy, without special tokens; `score` is None if there is no reward."""

    text: str
    score: float | None = None


def as_prompt(row: SFTRow) -> RLRow:
    """Return the messages before the first answer as a prompt, with that answer as ground truth."""
    return RLRow(
        row.data_source, row.prompt, "", RewardModel("rule", row.messages[len(row.prompt)].content)
    )


def chosen_rows(num_rows: int, num_prompts: int | None, seed: int, iteration: int) -> Sequence[int]:
    """Return an iteration's rows of an endless shuffled order; None takes all rows in order."""
    if num_prompts is None:
        return range(num_rows)
    order = ResumableOrder(
        num_rows=num_rows, batch_size=num_prompts, seed=derive_seed(seed, "self_play")
    )
    return array("q", order.batch(iteration - 1))


def requests_of(
    prompts: Sequence[RLPrompt],
    sampling: SamplingConfig,
    num_samples: int,
    seed: int,
    iteration: int,
) -> list[RolloutRequest]:
    """Return one request per prompt; `prompt.index`, its place in the iteration, is in the name."""
    asked = sampling_params(sampling)
    return [
        RolloutRequest(
            name := f"self_play={iteration}/prompt={prompt.index}",
            prompt.prompt_ids,
            asked,
            sample_seeds(seed, name, num_samples),
        )
        for prompt in prompts
    ]


def own_answers(
    completions: Sequence[Completion],
    scores: Sequence[Score | None] | None,
    decode: Callable[[Completion], str],
) -> Iterator[OwnAnswer]:
    """Yield the finished answers to one prompt; without `scores` they need no score."""
    for place, completion in enumerate(completions):
        text = decode(completion)
        score = None if scores is None else scores[place]
        if completion.finish_reason == "stop" and text.strip():
            if scores is None:
                yield OwnAnswer(text)
            elif score is not None:
                yield OwnAnswer(text, score.value)


def spin_pair(row: RLRow, answers: Sequence[OwnAnswer]) -> PreferenceRow | None:
    """Pair the data's answer with the policy's first other one (arXiv:2401.01335 alg. 1)."""
    chosen = str(row.reward_model.ground_truth)
    others = [each.text for each in answers if each.text.strip() != chosen.strip()]
    return PreferenceRow(row.prompt, chosen, others[0], row.data_source) if others else None


def best_worst_pair(row: RLRow, answers: Sequence[OwnAnswer]) -> PreferenceRow | None:
    """Pair the answers of largest and smallest reward; None if rewards or texts are equal."""
    scored = [(each.score, each.text) for each in answers if each.score is not None]
    if not scored:
        return None
    best, worst = max(scored, key=itemgetter(0)), min(scored, key=itemgetter(0))
    if best[0] == worst[0] or best[1].strip() == worst[1].strip():
        return None
    return PreferenceRow(row.prompt, best[1], worst[1], row.data_source, best[0] - worst[0])


def fitting(
    pairs: Sequence[PreferenceRow], tokenizer: ChatTokenizer, max_length: int
) -> list[PreferenceRow]:
    """Return the pairs whose conversations have at most `max_length` tokens."""
    lengths = pair_lengths(pairs, tokenizer) if pairs else []
    return [pair for pair, length in zip(pairs, lengths, strict=True) if length <= max_length]
