"""Held-out evaluation: greedy pass@1, and sampled pass@k, maj@k, avg@k, best@k, with intervals.

Promises: one greedy answer per row decides `accuracy`; a row whose answer could not be scored is
left out, not wrong; intervals count distinct problems; seeds are derived from (seed, row, sample),
whatever the batch. maj@k needs a reward that reports answers.
Equal evaluations give equal bytes of `summary.json` and `rows.parquet`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from engines.config.sections import EvaluationConfig
from engines.data.read.chat import prompt_text
from engines.data.read.examples import RLPrompt
from engines.rewards.base import Score, is_correct
from engines.trainers.evaluation.accuracy import (
    SampledAnswer,
    sampled_metrics,
    share_interval,
    sums_by_problem,
)
from engines.trainers.prompts import sample_seeds, sampling_params
from engines.trainers.scoring import CompletionScorer
from engines.types import Completion, Generate, RolloutRequest
from engines.vision.processor import PromptImages

PROBLEMS_PER_CALL = 1024
"""Problems per generation call: enough to keep the batch full, few enough to report progress."""


@dataclass(frozen=True)
class Answer:
    """One completion of a problem, with `num_tokens` sampled tokens.

    `score` and `correct` are None if the reward function could not score it. `answer` is the part
    that the reward read, empty if it found none, None if it does not report it.
    """

    text: str
    score: float | None
    correct: bool | None
    finish_reason: str
    num_tokens: int
    answer: str | None = None


@dataclass(frozen=True)
class EvaluatedProblem:
    """One problem with its greedy answer and its samples; `prompt_text` is what the model saw."""

    prompt: RLPrompt
    prompt_text: str
    greedy: Answer
    samples: tuple[Answer, ...]

    @property
    def ground_truth(self) -> str:
        """The true answer; as JSON if it is not text."""
        truth = self.prompt.row.reward_model.ground_truth
        return truth if isinstance(truth, str) else json.dumps(truth, sort_keys=True)

    @property
    def image_digests(self) -> tuple[str, ...]:
        """SHA-256 of the prompt's images in order."""
        return tuple(image.sha256 for image in self.prompt.row.images)

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Equal for rows with the same problem: prompt, true answer and images."""
        return self.prompt_text, self.ground_truth, self.image_digests


@dataclass(frozen=True)
class Evaluation:
    """Problems in the order of the split, metrics over all of them, and metrics by data source."""

    problems: tuple[EvaluatedProblem, ...]
    metrics: dict[str, float]
    sources: dict[str, dict[str, float]]


class Evaluator:
    """Evaluates the weights that `generate` samples from.

    Config fields that fall back to `rl.sampling` must be resolved. `seed` also sets the intervals.
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
        self._sampling = {
            kind: sampling_params(config.sampling(greedy=kind == "greedy"))
            for kind in ("greedy", "sampled")
        }

    def run(self, generate: Generate, report: Callable[[int, int], None]) -> Evaluation:
        """Answer and score every problem; `report` is called with (problems done, all problems)."""
        config, problems = self._config, list[EvaluatedProblem]()
        for start in range(0, len(self._prompts), PROBLEMS_PER_CALL):
            chunk = self._prompts[start : start + PROBLEMS_PER_CALL]
            greedy = self._answers(generate, chunk, "greedy", 1)
            sampled = self._answers(generate, chunk, "sampled", config.num_samples)
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
            summarize(problems, config, self._seed),
            {
                name: summarize(
                    [p for p in problems if p.prompt.row.data_source == name], config, self._seed
                )
                for name in names
            },
        )

    def _answers(
        self,
        generate: Generate,
        prompts: Sequence[RLPrompt],
        kind: Literal["greedy", "sampled"],
        num_samples: int,
    ) -> list[list[Answer]]:
        if not num_samples:
            return [[] for _ in prompts]
        requests = [
            RolloutRequest(
                name := f"evaluation/{kind}/problem={prompt.index}",
                prompt.prompt_ids,
                self._sampling[kind],
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
    """Return the metrics of at least one problem.

    `accuracy` with `_low` and `_high` (Wilson) and `reward/mean` of the greedy answers, if any is
    scored; lengths; counts of rows and of distinct problems; and for every k `pass@k`, `avg@k`,
    `best@k` and, if the reward reports answers, `maj@k`, each with `_low` and `_high`.
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
    scored = [
        (
            problem.identity,
            [
                SampledAnswer(each.answer, each.correct, each.score)
                for each in problem.samples
                if each.correct is not None and each.score is not None
            ],
        )
        for problem in problems
    ]
    for name, found in sampled_metrics(scored, ks, config.confidence, seed).items():
        metrics |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    return metrics


def by_source(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Return the metrics of each data source; empty if there is only one."""
    return evaluation.sources if len(evaluation.sources) > 1 else {}


def told_sources(evaluation: Evaluation) -> dict[str, float]:
    """Return the report's metrics by source, if there are several: `source/<its name>/<metric>`.

    Metrics with `/` in their name are left out, as a source's name may have one.
    """
    return {
        f"source/{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
        if "/" not in name
    }


ROWS_NAME = "rows.parquet"
_ANSWER = pa.struct(
    [
        ("text", pa.string()),
        ("score", pa.float64()),
        ("correct", pa.bool_()),
        ("finish_reason", pa.string()),
        ("num_tokens", pa.int32()),
        ("answer", pa.string()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("images", pa.list_(pa.string())),
        ("greedy", _ANSWER),
        ("samples", pa.list_(_ANSWER)),
    ]
)


def write_evaluation(evaluation: Evaluation, directory: Path) -> None:
    """Write `summary.json` and `rows.parquet` into an existing directory."""
    rows = [
        {
            "index": problem.prompt.index,
            "data_source": problem.prompt.row.data_source,
            "prompt": problem.prompt_text,
            "ground_truth": problem.ground_truth,
            "images": problem.image_digests,
            "greedy": asdict(problem.greedy),
            "samples": [asdict(answer) for answer in problem.samples],
        }
        for problem in evaluation.problems
    ]
    table = pa.Table.from_pylist(rows, _SCHEMA)
    pq.write_table(table, directory / ROWS_NAME, compression="zstd", store_schema=False)
    summary = {"schema": 1, "metrics": evaluation.metrics, "sources": evaluation.sources}
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
    (directory / "summary.json").write_text(f"{text}\n", encoding="utf-8", newline="")
