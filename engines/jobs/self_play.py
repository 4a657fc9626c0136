"""Job `self_play`: samples answers of a policy to rows of a dataset and makes pairs of them.

preference.parquet   the pairs
summary.json         counts of pairs and of prompts without one

At least one answer of a pair is sampled from the policy.
Promises: preference training with the same context accepts every pair; in memory are the pairs of
one call and of an unwritten batch. Rows and seeds depend only on (seed, iteration, row). An
answer that was cut, is blank or could not be scored is in no pair; rows without a pair are counted.
Lengths are those of the rendered text, as training sees it.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

from engines.config.rollout import SamplingConfig
from engines.config.rules.models import check_not_self_played
from engines.config.stages.serving import SelfPlayStageConfig
from engines.data.order import ResumableOrder
from engines.data.prepare.stored_rows import stored
from engines.data.read.dataset import PREFERENCE_FILE, SUMMARY_FILE, Dataset, load_dataset
from engines.data.read.examples import RLPrompt, RLPrompts, pair_lengths
from engines.data.read.lazy_sequence import Made, MappedRows
from engines.data.read.row_files import PREFERENCE_FORMAT, write_batches
from engines.data.read.rows import PreferenceRow, RewardModel, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.errors import NothingToTrainOnError
from engines.jobs.process.policy_stage import local_reward, policy_tokenizer, prompts_within
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.serving.answers import Generate, KeptAnswers
from engines.jobs.serving.frozen_models import serve
from engines.jobs.serving.model import load_served
from engines.rewards.base import Score
from engines.rewards.resolve import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.prompts import derive_seed, sample_seeds, sampling_params
from engines.trainers.scoring import CompletionScorer
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError

KIND = "pairs"
PROMPTS_PER_CALL = 256
"""Prompts of one call, whose answers are stored together."""


@dataclass
class PairCounts:
    """Counts of an iteration's prompts: kept pairs, no pair, pair too long, prompt too long."""

    num_pairs: int = 0
    num_unpaired: int = 0
    num_overlong_pairs: int = 0
    num_overlong_prompts: int = 0


def self_play(context: JobContext[SelfPlayStageConfig]) -> JobOutput:
    """Sample answers of the policy and pair them."""
    with ExitStack() as stack:
        rewards = stack.enter_context(RewardScorer(local_reward(context, context.config.reward)))
        with context.clock("load"):
            served = load_served(context)
            prompts, num_overlong = _prompts(context, stack, policy_tokenizer(served.hf_dir))
            counts = PairCounts(num_overlong_prompts=num_overlong)
            engines, scorer = serve(context, stack, served, rewards)
            # Stored call by call, so that a restarted job does not sample again.
            answers = KeptAnswers(context, engines.generate)
        context.heartbeat.enter("evaluate", DEADLINES_S["evaluate"])
        with context.clock("gen"):
            made = stored(
                context.attempt_dir / "pairs.arrow",
                PREFERENCE_FORMAT,
                kept_pairs(context, scorer, answers, prompts, counts),
            )
    if not counts.num_pairs and counts.num_overlong_pairs:
        raise ConfigError(
            "model.max_length",
            f"got {context.config.max_length}; each of the {counts.num_overlong_pairs} pairs that "
            "were made has an answer that exceeds it together with its prompt, as preference "
            "training reads them; raise it, or lower "
            "preference.self_play.sampling.max_new_tokens",
        )
    if not counts.num_pairs:
        raise NothingToTrainOnError(
            f"none of {counts.num_unpaired} prompts made a pair: every answer was cut, blank, "
            "unscored, or equal in text or reward to what it is compared with; raise "
            "preference.self_play.sampling.max_new_tokens or temperature, or end with an iteration "
            "less"
        )
    write_batches(
        context.output_dir / PREFERENCE_FILE, PREFERENCE_FORMAT, made.batches(), made.is_plain
    )
    metrics = {name: float(count) for name, count in asdict(counts).items()}
    (context.output_dir / SUMMARY_FILE).write_text(
        json.dumps(metrics, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    return JobOutput(KIND, metrics)


def _prompts(
    context: JobContext[SelfPlayStageConfig], stack: ExitStack, tokenizer: ChatTokenizer
) -> tuple[RLPrompts, int]:
    """Return the prompts and the number of too long ones left out; the stack closes the rows."""
    config = context.config
    rows = asked_rows(
        config,
        load_dataset(context.input("dataset")),
        context.spec.seed,
        stack,
        context.attempt_dir,
    )
    by_reward = config.self_play.source == "best_worst"
    prompts = prompts_within(
        rows,
        tokenizer,
        config.max_length,
        config.sampling.max_new_tokens,
        "preference.self_play.sampling.max_new_tokens",
        # The data limit only whole conversations, so their prompts may leave no room for an answer.
        on_overlong="error" if by_reward else "drop",
    )
    if by_reward:
        check_data_sources(config.reward, prompts.data_sources)
    return prompts, len(rows) - len(prompts)


def kept_pairs(
    context: JobContext[SelfPlayStageConfig],
    scorer: CompletionScorer,
    generate: Generate,
    prompts: RLPrompts,
    counts: PairCounts,
) -> Iterator[PreferenceRow]:
    """Yield the pairs that fit into the context, in prompt order; samples call by call."""
    config, section = context.config, context.config.self_play
    spins, decode = section.source == "spin", scorer.decode
    pair_of = spin_pair if spins else best_worst_pair
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        asked = prompts[start : start + PROMPTS_PER_CALL]
        rows = [prompt.row for prompt in asked]
        requests = requests_of(
            asked,
            config.sampling,
            section.samples_per_prompt,
            context.spec.seed,
            config.iteration,
        )
        completions = generate(requests)
        scores = [None] * len(rows) if spins else scorer.judge(rows, completions, requests)
        found = (
            pair_of(row, [*own_answers(of_row, judged, decode)])
            for row, of_row, judged in zip(rows, completions, scores, strict=True)
        )
        made = [pair for pair in found if pair is not None]
        kept = fitting(made, scorer.tokenizer, config.max_length)
        counts.num_pairs += len(kept)
        counts.num_unpaired += len(asked) - len(made)
        counts.num_overlong_pairs += len(made) - len(kept)
        yield from kept
        context.heartbeat.tick()
        done = start + len(asked)
        context.journal.progress(
            done, len(prompts), f"{counts.num_pairs} pairs of {done} of {len(prompts)} prompts"
        )


def asked_rows(
    config: SelfPlayStageConfig, dataset: Dataset, seed: int, stack: ExitStack, scratch_dir: Path
) -> Sequence[RLRow]:
    """Return the prompts of an iteration, read lazily: of `data.sft` for `spin`, else `data.rl`.

    Reading a row that no text answer can be paired with (its first answer calls tools, or it shows
    images) raises `ConfigError`.
    """
    section = config.self_play
    rows = (
        MappedRows(dataset.sft_rows(), scratch_dir)
        if section.source == "spin"
        else MappedRows(dataset.rl_rows(), scratch_dir)
    )
    stack.enter_context(closing(rows))

    def asked(place: int) -> RLRow:
        row = rows[place]
        if isinstance(row, SFTRow):
            if row.messages[len(row.prompt)].tool_calls:
                raise ConfigError(
                    "data.sft",
                    f"row {place} of the split calls tools in its first answer; need a text, which "
                    "spin can pair with a text of the policy; leave out such rows",
                )
            return as_prompt(row)
        if row.images:
            check_not_self_played(f"row {place} of the split shows images")
        return row

    return Made(chosen_rows(len(rows), section.num_prompts, seed, config.iteration), asked)


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
    """Yield answers to one prompt that stopped and are not blank; with `scores`, if scored."""
    for place, completion in enumerate(completions):
        text = decode(completion)
        score = None if scores is None else scores[place]
        if completion.finish_reason == "stop" and text.strip():
            if scores is None:
                yield OwnAnswer(text)
            elif score is not None:
                yield OwnAnswer(text, score.value)


def spin_pair(row: RLRow, answers: Sequence[OwnAnswer]) -> PreferenceRow | None:
    """Pair the data's answer with the policy's first different one (arXiv:2401.01335 alg. 1)."""
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


if __name__ == "__main__":
    run_job(SelfPlayStageConfig, self_play)
