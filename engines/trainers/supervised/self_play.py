"""Pairs of answers of which one or both are the policy's own.

Promises: which rows an iteration takes, and the seeds of their answers, depend on (seed, iteration,
row) alone. An answer that was cut at the length limit, is blank or could not be scored is in no
pair: nobody knows how it ends or what it is worth. Each row that makes no pair is counted. A pair
is as long as it is to whoever trains on it: what was sampled is read as text, and a template may
write behind it.
Does not promise a pair of every row, or that a better answer is a good one.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engines.config.rollout import SamplingConfig
from engines.data.order.resumable import ResumableOrder
from engines.data.read.examples import RLPrompt
from engines.data.read.pairs import pair_lengths
from engines.data.read.rows import PreferenceRow, RewardModel, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.rewards.base import Score
from engines.trainers.samples.params import sampling_params
from engines.trainers.samples.prompts import derive_seed, sample_seeds
from engines.types import Completion, RolloutRequest


@dataclass(frozen=True)
class OwnAnswer:
    """An answer of the policy.

    Attributes:
        text: without special tokens.
        score: of the reward; None where nobody scored it.
    """

    text: str
    score: float | None = None


def as_prompt(row: SFTRow) -> RLRow:
    """A conversation as a prompt: what stands before the first answer, which is the ground truth.

    Args:
        row: of the supervised split.

    Returns:
        What is asked.
    """
    answer = row.messages[len(row.prompt)].content
    return RLRow(row.data_source, row.prompt, "", RewardModel("rule", answer))


def chosen_rows(num_rows: int, num_prompts: int | None, seed: int, iteration: int) -> Sequence[int]:
    """Which rows an iteration asks about.

    Args:
        num_rows: of the split, at least 1.
        num_prompts: of the iteration, of an endless shuffled order; None: all, as they stand.
        seed: of the run.
        iteration: counted from 1.

    Returns:
        Their places; with more prompts than rows some come again.
    """
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
    """What the policy is asked.

    Args:
        prompts: some of the iteration; the index of each is its place in it.
        sampling: of an answer.
        num_samples: answers to each.
        seed: of the run.
        iteration: counted from 1.

    Returns:
        One request for each prompt, whose index is in its name.
    """
    asked = sampling_params(sampling)
    names = [f"self_play={iteration}/prompt={prompt.index}" for prompt in prompts]
    return [
        RolloutRequest(name, prompt.prompt_ids, asked, sample_seeds(seed, name, num_samples))
        for name, prompt in zip(names, prompts, strict=True)
    ]


def own_answers(
    completions: Sequence[Completion],
    scores: Sequence[Score | None] | None,
    decode: Callable[[Completion], str],
) -> Iterator[OwnAnswer]:
    """The answers to one prompt that can be in a pair.

    Args:
        completions: to the prompt.
        scores: of each; None where nobody scores.
        decode: makes the text of one.

    Yields:
        OwnAnswer: in their order.
    """
    for place, completion in enumerate(completions):
        text = decode(completion)
        score = None if scores is None else scores[place]
        if completion.finish_reason == "stop" and text.strip():
            if scores is None:
                yield OwnAnswer(text)
            elif score is not None:
                yield OwnAnswer(text, score.value)


def spin_pair(row: RLRow, answers: Sequence[OwnAnswer]) -> PreferenceRow | None:
    """The answer of the data against the policy's (arXiv:2401.01335 alg. 1).

    Args:
        row: of `as_prompt`.
        answers: of the policy.

    Returns:
        With the first answer that is another text; None where there is none.
    """
    chosen = str(row.reward_model.ground_truth)
    others = [each.text for each in answers if each.text.strip() != chosen.strip()]
    return PreferenceRow(row.prompt, chosen, others[0], row.data_source) if others else None


def best_worst_pair(row: RLRow, answers: Sequence[OwnAnswer]) -> PreferenceRow | None:
    """The answer of the largest reward against that of the smallest.

    Args:
        row: of the prompt.
        answers: with their scores.

    Returns:
        Of equal ones the first; `margin` is the difference. None where no two rewards, or no two
        texts, differ.
    """
    scored = [(each.score, each.text) for each in answers if each.score is not None]
    if not scored:
        return None
    best, worst = max(scored, key=_score), min(scored, key=_score)
    if best[0] == worst[0] or best[1].strip() == worst[1].strip():
        return None
    margin = best[0] - worst[0]
    return PreferenceRow(row.prompt, best[1], worst[1], row.data_source, margin)


def fitting(
    pairs: Sequence[PreferenceRow], tokenizer: ChatTokenizer, max_length: int
) -> list[PreferenceRow]:
    """The pairs that preference training has room for.

    Args:
        pairs: none, or some.
        tokenizer: of the policy.
        max_length: most tokens of a conversation.

    Returns:
        In their order.
    """
    lengths = pair_lengths(pairs, tokenizer) if pairs else []
    return [pair for pair, length in zip(pairs, lengths, strict=True) if length <= max_length]


def _score(scored: tuple[float, str]) -> float:
    return scored[0]
