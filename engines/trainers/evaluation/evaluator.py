"""Held-out evaluation: greedy pass@1, and sampled pass@k, maj@k, avg@k, best@k, with intervals.

Promises: one greedy answer per row decides `accuracy`; a row whose answer could not be scored is
counted and left out, never wrong by default; intervals count distinct problems, however many rows
ask each; seeds are derived from (seed, row, sample), so an evaluation repeats whatever shares the
batch. The rows keep every text.
Does not promise: maj@k where the reward does not say what it read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from engines.config.sections import EvaluationConfig
from engines.data.read.chat import prompt_text
from engines.data.read.examples import RLPrompt
from engines.rewards.base import Score
from engines.trainers.evaluation.repeated import share_interval, sums_by_problem
from engines.trainers.evaluation.sampled import SampledAnswer, sampled_metrics
from engines.trainers.samples.params import sampling_params
from engines.trainers.samples.prompts import sample_seeds
from engines.trainers.samples.scoring import CompletionScorer, is_correct
from engines.types import Completion, RolloutRequest, SamplingParams
from engines.vision.processor import PromptImages

PROBLEMS_PER_CALL = 1024
"""Problems of one generation call: large enough to keep the batch full, small enough to report."""

Generate = Callable[[Sequence[RolloutRequest]], list[list[Completion]]]


@dataclass(frozen=True)
class Answer:
    """One completion of a problem.

    Attributes:
        text: what the model wrote.
        score: what the reward function gave, None if it could not score it.
        correct: whether it counts as right, None if it could not be scored.
        finish_reason: `stop` or `length`.
        num_tokens: sampled tokens.
        answer: what the reward read of it, empty where it found none; None where it does not say.
    """

    text: str
    score: float | None
    correct: bool | None
    finish_reason: str
    num_tokens: int
    answer: str | None = None


@dataclass(frozen=True)
class EvaluatedProblem:
    """One problem with its answers.

    Attributes:
        prompt: the tokenized problem.
        prompt_text: as the model saw it.
        greedy: the most likely answer, token by token.
        samples: sampled answers, for pass@k and its like.
    """

    prompt: RLPrompt
    prompt_text: str
    greedy: Answer
    samples: tuple[Answer, ...]

    @property
    def ground_truth(self) -> str:
        """The true answer; JSON of what is no text."""
        truth = self.prompt.row.reward_model.ground_truth
        return truth if isinstance(truth, str) else json.dumps(truth, sort_keys=True)

    @property
    def image_digests(self) -> tuple[str, ...]:
        """Of the images that the prompt shows, in their order."""
        return tuple(image.sha256 for image in self.prompt.row.images)

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Equal of rows that hold one problem: prompt, true answer and images."""
        return self.prompt_text, self.ground_truth, self.image_digests


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        problems: in the order of the split.
        metrics: over all problems.
        sources: the same metrics by data source.
    """

    problems: tuple[EvaluatedProblem, ...]
    metrics: dict[str, float]
    sources: dict[str, dict[str, float]]


class Evaluator:
    """Evaluates whatever weights `generate` samples from.

    Args:
        config: what to measure; what falls back to `rl.sampling` must be resolved.
        prompts: the tokenized evaluation split.
        scorer: judges the answers.
        seed: of the sampled part.
        images: of the prompts; None: they show none.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: Sequence[RLPrompt],
        scorer: CompletionScorer,
        seed: int,
        images: PromptImages | None = None,
    ) -> None:
        self._images = images
        self._config = config
        self._prompts = prompts[: config.num_problems]
        self._scorer = scorer
        self._seed = seed
        self._greedy = sampling_params(config.sampling(greedy=True))
        self._sampled = sampling_params(config.sampling(greedy=False))

    def run(self, generate: Generate, report: Callable[[int, int], None]) -> Evaluation:
        """Answer and judge every problem.

        Args:
            generate: samples requests; completions by request and seed.
            report: told (problems done, problems in all) now and then.

        Returns:
            Every answer, and what they add up to.
        """
        problems: list[EvaluatedProblem] = []
        for start in range(0, len(self._prompts), PROBLEMS_PER_CALL):
            chunk = self._prompts[start : start + PROBLEMS_PER_CALL]
            greedy = self._answers(generate, chunk, "greedy", self._greedy)
            sampled: list[list[Answer]] = [[] for _ in chunk]
            if self._config.num_samples:
                sampled = self._answers(
                    generate, chunk, "sampled", self._sampled, self._config.num_samples
                )
            problems += [
                EvaluatedProblem(
                    prompt,
                    prompt_text(self._scorer.tokenizer, prompt.row.prompt),
                    first[0],
                    tuple(others),
                )
                for prompt, first, others in zip(chunk, greedy, sampled, strict=True)
            ]
            report(len(problems), len(self._prompts))
        names = sorted({problem.prompt.row.data_source for problem in problems})
        return Evaluation(
            tuple(problems),
            summarize(problems, self._config, self._seed),
            {
                name: summarize(
                    [p for p in problems if p.prompt.row.data_source == name],
                    self._config,
                    self._seed,
                )
                for name in names
            },
        )

    def _answers(
        self,
        generate: Generate,
        prompts: Sequence[RLPrompt],
        kind: Literal["greedy", "sampled"],
        sampling: SamplingParams,
        num_samples: int = 1,
    ) -> list[list[Answer]]:
        requests = [
            RolloutRequest(
                name := f"evaluation/{kind}/problem={prompt.index}",
                prompt.prompt_ids,
                sampling,
                sample_seeds(self._seed, name, num_samples),
                images=self._images.encoded(prompt.row) if self._images else (),
            )
            for prompt in prompts
        ]
        completions = generate(requests)
        results = self._scorer.judge([prompt.row for prompt in prompts], completions, requests)
        return [
            [
                self._answer(completion, result)
                for completion, result in zip(row, scores, strict=True)
            ]
            for row, scores in zip(completions, results, strict=True)
        ]

    def _answer(self, completion: Completion, result: Score | None) -> Answer:
        return Answer(
            text=self._scorer.decode(completion),
            score=None if result is None else result.value,
            correct=None if result is None else is_correct(result),
            finish_reason=completion.finish_reason,
            num_tokens=len(completion.token_ids),
            answer=None if result is None else result.answer,
        )


def summarize(
    problems: Sequence[EvaluatedProblem], config: EvaluationConfig, seed: int
) -> dict[str, float]:
    """Metrics of some problems.

    Args:
        problems: at least one.
        config: confidence and the values of k.
        seed: of the intervals that are drawn.

    Returns:
        `accuracy` with `accuracy_low` and `accuracy_high` (Wilson), `reward/mean` of the greedy
        answers, lengths, counts of rows and of distinct problems, and for every k `pass@k`,
        `avg@k`, `best@k` and, where the reward says what it read, `maj@k`, each with `_low` and
        `_high`. Where nothing could be scored, neither of the first two.
    """
    verdicts = [(p.identity, p.greedy.correct) for p in problems if p.greedy.correct is not None]
    metrics = {
        "num_problems": float(len(problems)),
        "num_distinct_problems": float(len({p.identity for p in problems})),
        "num_unscored": float(len(problems) - len(verdicts)),
        "response_length/mean": fmean(p.greedy.num_tokens for p in problems),
        "response_length/clip_ratio": fmean(p.greedy.finish_reason == "length" for p in problems),
    }
    scores = [p.greedy.score for p in problems if p.greedy.score is not None]
    if scores:
        metrics["reward/mean"] = fmean(scores)
    if verdicts:
        low, high = share_interval(sums_by_problem(verdicts), config.confidence)
        metrics |= {
            "accuracy": sum(correct for _, correct in verdicts) / len(verdicts),
            "accuracy_low": low,
            "accuracy_high": high,
        }
    ks = config.pass_at if config.num_samples else ()
    scored = [(problem.identity, scored_samples(problem)) for problem in problems]
    for name, found in sampled_metrics(scored, ks, config.confidence, seed).items():
        metrics |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    return metrics


def scored_samples(problem: EvaluatedProblem) -> list[SampledAnswer]:
    """The samples of a problem that could be scored."""
    return [
        SampledAnswer(each.answer, each.correct, each.score)
        for each in problem.samples
        if each.correct is not None and each.score is not None
    ]


def by_source(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """The metrics of each data source, where there is more than one; else nothing."""
    return evaluation.sources if len(evaluation.sources) > 1 else {}


def told_sources(evaluation: Evaluation) -> dict[str, float]:
    """What the report shows of each data source: `source/<its name>/<metric>`.

    Args:
        evaluation: of one or more sources; with one there is nothing to add.

    Returns:
        The metrics whose names hold no `/`, for a source's own name may.
    """
    return {
        f"source/{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
        if "/" not in name
    }
