"""Job `self_play`: samples answers of a policy to rows of a dataset and makes pairs of them.

preference.parquet   the pairs
summary.json         counts of pairs and of prompts without one

Promises: preference training with the same context accepts every pair; pairs are in memory only
until those of their call are written.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.config.rules.models import check_not_self_played
from engines.config.stages.serving import SelfPlayStageConfig
from engines.data.prepare.stored_rows import stored
from engines.data.read.dataset import PREFERENCE_FILE, SUMMARY_FILE, Dataset, load_dataset
from engines.data.read.examples import RLPrompt, RLPrompts
from engines.data.read.lazy_sequence import Made, MappedRows
from engines.data.read.row_files import PREFERENCE_FORMAT, write_batches
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from engines.errors import NothingToTrainOnError
from engines.jobs.process.policy_stage import local_reward, policy_tokenizer, prompts_within
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.serving.answers import Generate, KeptAnswers
from engines.jobs.serving.frozen_models import serve
from engines.jobs.serving.model import load_served
from engines.rewards.resolve import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.scoring import CompletionScorer
from engines.trainers.supervised.self_play import (
    as_prompt,
    best_worst_pair,
    chosen_rows,
    fitting,
    own_answers,
    requests_of,
    spin_pair,
)
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
    _check_made(counts, context.config)
    write_batches(
        context.output_dir / PREFERENCE_FILE, PREFERENCE_FORMAT, made.batches(), made.is_plain
    )
    metrics = {name: float(count) for name, count in asdict(counts).items()}
    text = json.dumps(metrics, indent=2, sort_keys=True) + "\n"
    (context.output_dir / SUMMARY_FILE).write_text(text, encoding="utf-8")
    return JobOutput(KIND, metrics)


def _prompts(
    context: JobContext[SelfPlayStageConfig], stack: ExitStack, tokenizer: ChatTokenizer
) -> tuple[RLPrompts, int]:
    """Return the prompts and the number of rows too long to be asked; the stack closes the rows."""
    config = context.config
    dataset = load_dataset(context.input("dataset"))
    rows = asked_rows(config, dataset, context.spec.seed, stack, context.attempt_dir)
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


def _check_made(counts: PairCounts, config: SelfPlayStageConfig) -> None:
    """Raise an error if no pair can be trained on."""
    if counts.num_pairs:
        return
    if counts.num_overlong_pairs:
        raise ConfigError(
            "model.max_length",
            f"got {config.max_length}; each of the {counts.num_overlong_pairs} pairs that were "
            "made has an answer that exceeds it together with its prompt, as preference training "
            "reads them; raise it, or lower preference.self_play.sampling.max_new_tokens",
        )
    raise NothingToTrainOnError(
        f"none of {counts.num_unpaired} prompts made a pair: every answer was cut, blank or equal "
        "to the one it is compared with; raise max_new_tokens or temperature in "
        "preference.self_play.sampling, or lower preference.self_play.num_iterations"
    )


def kept_pairs(
    context: JobContext[SelfPlayStageConfig],
    scorer: CompletionScorer,
    generate: Generate,
    prompts: RLPrompts,
    counts: PairCounts,
) -> Iterator[PreferenceRow]:
    """Yield the pairs that fit into the context, in prompt order; sampled lazily by call."""
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        asked = prompts[start : start + PROMPTS_PER_CALL]
        made = made_pairs(context, scorer, generate, asked)
        kept = fitting(made, scorer.tokenizer, context.config.max_length)
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


def made_pairs(
    context: JobContext[SelfPlayStageConfig],
    scorer: CompletionScorer,
    generate: Generate,
    prompts: Sequence[RLPrompt],
) -> list[PreferenceRow]:
    """Return the pairs made from some prompts, in prompt order; not every prompt makes one."""
    config, section = context.config, context.config.self_play
    num_samples, seed = section.samples_per_prompt, context.spec.seed
    requests = requests_of(prompts, config.sampling, num_samples, seed, config.iteration)
    completions = generate(requests)
    rows, decode = [prompt.row for prompt in prompts], scorer.decode
    spins = section.source == "spin"
    scores = [None] * len(rows) if spins else scorer.judge(rows, completions, requests)
    pair_of = spin_pair if spins else best_worst_pair
    found = (
        pair_of(row, [*own_answers(of_row, judged, decode)])
        for row, of_row, judged in zip(rows, completions, scores, strict=True)
    )
    return [pair for pair in found if pair is not None]


if __name__ == "__main__":
    run_job(SelfPlayStageConfig, self_play)
