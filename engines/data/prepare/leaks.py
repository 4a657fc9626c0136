"""Find training rows that share words with held-out rows, and remove or refuse them.

Compares, by the rules of `engines.data.prepare.decontamination`, the prompts of held-out rows with
the prompts, later messages and answers of training rows. System messages, ground truths and
held-out answers are ignored.
The template of a prompt is what all prompts of its `data_source` begin or end with, if at least
`MIN_TEMPLATE_ROWS` of them differ. Prompts may be equal with or without it, but a shared template
alone is no leak, since all problems with one instruction would match. A short answer that equals
a prompt without its template is no leak either.
Promises: equal rows give equal reports, with at most one entry per training row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from engines.config.data import DecontaminationConfig
from engines.data.prepare.decontamination import EvaluationIndex, Prompt, words_of
from engines.data.read.rows import Message, PreferenceRow, RLRow, SFTRow
from infra.errors import ConfigError

MIN_TEMPLATE_ROWS = 8
"""Fewer prompts may share words by chance, or because they are one problem."""
Row = SFTRow | RLRow | PreferenceRow
_SCHEMA_VERSION = 1


class Rows(Protocol):
    """Rows of one split, which may be on disk; they are iterated twice."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class Leak:
    """A training row and the first held-out row that it shares words with; rows count from 0.

    `kind` is `exact` (all words of both texts) or `run`; `words` are normalized;
    `num_evaluation_rows` counts the held-out rows that share words with the training row.
    """

    split: str
    row: int
    kind: Literal["exact", "run"]
    words: str
    evaluation_split: str
    evaluation_row: int
    num_evaluation_rows: int


@dataclass(frozen=True)
class LeakReport:
    """Words shared by training and held-out rows.

    `num_rows` and `num_leaked` are by split. Runs have `num_words` words; held-out texts of
    `min_words` or more are searched inside others.
    """

    num_words: int
    min_words: int
    num_rows: Mapping[str, int]
    num_leaked: Mapping[str, int]
    leaks: tuple[Leak, ...]

    def to_json(self) -> str:
        """Return the JSON text; equal reports give equal bytes."""
        values = {"schema": _SCHEMA_VERSION, **asdict(self)}
        return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def rows_of(self, split: str) -> frozenset[int]:
        """Return the rows of a training split that share words."""
        return frozenset(leak.row for leak in self.leaks if leak.split == split)


def find_leaks(
    training: Mapping[str, Rows],
    held_out: Mapping[str, Rows],
    config: DecontaminationConfig,
) -> LeakReport:
    """Compare every training row with all held-out rows; both are given by split.

    Raises:
        ConfigError: there are leaks and `action` is `refuse`, or all rows of a split leak.
    """
    prompts = {split: (prompt for _, prompt in _prompts(rows)) for split, rows in held_out.items()}
    index = EvaluationIndex(prompts, config.num_words, config.min_words)
    leaks = tuple(
        leak for split, rows in training.items() for leak in _leaks_of(split, rows, index)
    )
    report = LeakReport(
        num_words=config.num_words,
        min_words=config.min_words,
        num_rows={split: len(rows) for split, rows in (*training.items(), *held_out.items())},
        num_leaked={split: sum(leak.split == split for leak in leaks) for split in training},
        leaks=leaks,
    )
    _check(report, config)
    return report


def _check(report: LeakReport, config: DecontaminationConfig) -> None:
    if report.leaks and config.action == "refuse":
        first = report.leaks[0]
        raise ConfigError(
            "data.decontamination",
            f"got {len(report.leaks)} training rows that share words with held-out ones (first: "
            f"{first.split} row {first.row} and {first.evaluation_split} row "
            f"{first.evaluation_row}: {first.words!r:.200}); need none; remove them, or set "
            "data.decontamination.action=remove",
        )
    for split, num_leaked in report.num_leaked.items():
        if num_leaked and num_leaked == report.num_rows[split]:
            raise ConfigError(
                f"data.{split}",
                f"got {num_leaked} rows, all of which share words with held-out ones; need at "
                "least 1 other; use other data, or raise data.decontamination.num_words",
            )


def _leaks_of(split: str, rows: Rows, index: EvaluationIndex) -> Iterator[Leak]:
    for number, (row, prompt) in enumerate(_prompts(rows)):
        found = [*index.shared(prompt)]
        for message in _later(row):
            found += index.shared(message.said, is_answer=message.role != "user")
        if not found:
            continue
        kind, words, places = next((each for each in found if each[0] == "exact"), found[0])
        evaluation_split, evaluation_row = places[0]
        num_rows = len({place for _, _, places in found for place in places})
        yield Leak(split, number, kind, words, evaluation_split, evaluation_row, num_rows)


def _later(row: Row) -> Sequence[Message]:
    if isinstance(row, PreferenceRow):
        return row.answers
    if isinstance(row, SFTRow):
        return row.messages[len(row.prompt) :]
    return ()


def _prompts(rows: Rows) -> Iterator[tuple[Row, Prompt]]:
    templates = _templates(rows)
    for row in rows:
        yield row, Prompt(_words(row), *templates[row.data_source])


def _words(row: Row) -> list[str]:
    texts = [message.said for message in row.prompt if message.role != "system"]
    return words_of("\n".join(texts))


def _templates(rows: Rows) -> dict[str, tuple[int, int]]:
    """Return by source how many words all its prompts begin with, and end with."""
    found: dict[str, _Template] = {}
    for row in rows:
        words = _words(row)
        found.setdefault(row.data_source, _Template(words)).add(words)
    return {source: template.lengths for source, template in found.items()}


class _Template:
    """The common words of one source's prompts, in memory that does not grow with the rows."""

    def __init__(self, words: list[str]) -> None:
        self._start, self._reversed_end, self._shortest = words, words[::-1], len(words)
        self._different: set[tuple[str, ...]] = set()

    def add(self, words: list[str]) -> None:
        self._start = _common_start(self._start, words)
        self._reversed_end = _common_start(self._reversed_end, words[::-1])
        self._shortest = min(self._shortest, len(words))
        if len(self._different) < MIN_TEMPLATE_ROWS:
            self._different.add(tuple(words))

    @property
    def lengths(self) -> tuple[int, int]:
        """Words at the start and the end, together at most those of the shortest prompt."""
        if len(self._different) < MIN_TEMPLATE_ROWS:
            return 0, 0
        start = len(self._start)
        return start, min(len(self._reversed_end), self._shortest - start)


def _common_start(first: list[str], second: list[str]) -> list[str]:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:place]
    return min(first, second, key=len)
