"""Find training rows that share words with held-out rows, and remove or refuse them.

Prompts of held-out rows are compared with the prompts, later messages and answers of training rows;
system messages, ground truths and held-out answers are ignored.
Case, white space, character width, punctuation, combining marks that do not compose with a letter,
and invisible characters are ignored. The point inside a number and operators before a number are
not: `3 + 4` differs from `3 * 4`, which equals `3 × 4`. In scripts without spaces (Han, Thai), each
character is a word.
A held-out prompt is found in a training text if they share `num_words` words in a row; a shorter
one if all its words occur in a row. 13 words, and 8 as the minimum, follow GPT-3
(arXiv:2005.14165, appendix C); below 8, where chance matches are many, only equal prompts count.
The template of a prompt is what all prompts of its `data_source` begin or end with, if at least
`MIN_TEMPLATE_ROWS` of them differ. Prompts may be equal with or without it, but a shared template
alone is no leak, since all problems with one instruction would match. A short answer that equals
a prompt without its template is no leak either.

Promises: exactly these matches are found; memory grows with held-out rows and leaks; equal rows get
equal reports, with at most one entry per training row.
Does not promise: to find paraphrases.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from typing import Any, Literal, TypeAlias

from engines.config.data import DecontaminationConfig
from engines.data.prepare.stored_rows import StoredRows
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow
from infra.errors import ConfigError

MIN_TEMPLATE_ROWS = 8
"""Different prompts needed to find a template; fewer may share words by chance."""
_SCHEMA_VERSION = 1
_WITHOUT_SPACES = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, Kana and Han."""
_WORD = re.compile(
    rf"\d+(?:\.\d+)*|[{_WITHOUT_SPACES}]|[^\W\d_{_WITHOUT_SPACES}]+|[-+*/%^=<>](?=\s*\d)"
)
_SIGNS = {"-": "−–‐‒", "*": "×·∗⋅∙", "/": "÷∕⁄"}
"""Other signs for an operator, which NFKC does not normalize."""


@dataclass(frozen=True)
class Prompt:
    """The words of a prompt; the first `num_before` and the last `num_after` are its template."""

    words: list[str]
    num_before: int = 0
    num_after: int = 0

    @property
    def own(self) -> list[str]:
        """The words without the template."""
        return self.words[self.num_before : len(self.words) - self.num_after]

    @property
    def forms(self) -> Iterable[list[str]]:
        """All words, and the words without the template; distinct and not empty."""
        own = self.own
        return filter(None, (self.words, own) if len(own) < len(self.words) else (own,))


Place = tuple[str, int]
"""Source and row of an evaluation text."""
Shared: TypeAlias = tuple[Literal["exact", "run"], str, tuple[Place, ...]]
"""Kind, shared words, and the evaluation texts that contain them."""


class EvaluationIndex:
    """Finds evaluation prompts that share `num_words` words in a row with a training text.

    `evaluation` has the prompts by source, read once. A shorter prompt of at least `min_words`
    words has to occur as a whole.

    Raises:
        ValueError: `num_words` is less than 1.
    """

    def __init__(
        self,
        evaluation: Mapping[str, Iterable[str | Prompt]],
        num_words: int = 13,
        min_words: int = 8,
    ) -> None:
        if num_words < 1:
            raise ValueError(f"num_words: got {num_words}; need >= 1")
        self._num_words = num_words
        self._min_words = max(1, min(num_words, min_words))
        # Dicts as ordered sets keep the order of the rows.
        runs: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        exact: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        lengths: set[int] = set()
        for source, prompts in evaluation.items():
            for row, prompt in enumerate(map(_prompt, prompts)):
                for words in prompt.forms:
                    exact[" ".join(words)][source, row] = None
                for length, run in self._runs_of(prompt):
                    lengths.add(length)
                    runs[run][source, row] = None
        self._runs = {run: tuple(places) for run, places in runs.items()}
        self._exact = {words: tuple(places) for words, places in exact.items()}
        self._lengths = sorted(lengths, reverse=True)

    def _runs_of(self, prompt: Prompt) -> Iterator[tuple[int, str]]:
        """Yield the runs of a prompt to search for, with their length in words.

        If the words without the template are too few, runs include words of the template.
        """
        words, own = prompt.words, prompt.own
        length = min(self._num_words, len(own))
        if length >= self._min_words:
            yield from ((length, run) for run in _runs(own, length))
        elif own and len(words) >= self._min_words:
            length = min(self._num_words, len(words))
            last = min(prompt.num_before + length, len(words))
            first = max(prompt.num_before + len(own), length)
            yield from ((length, run) for run in _runs(words[first - length : last], length))

    def shared(self, text: str | Prompt, *, is_answer: bool = False) -> Iterator[Shared]:
        """Yield the matches of a training text: equal prompts first, then runs from the longest.

        If `is_answer`, an exact match needs `min_words` words, since short answers match by chance.
        """
        prompt = _prompt(text)
        for words in prompt.forms:
            whole = " ".join(words)
            if whole in self._exact and not (is_answer and len(words) < self._min_words):
                yield "exact", whole, self._exact[whole]
        for length in self._lengths:
            for run in dict.fromkeys(_runs(prompt.own, length)):
                if run in self._runs:
                    yield "run", run, self._runs[run]


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are compared: NFKC-normalized and case-folded."""
    if text.isascii():
        # NFKC keeps ASCII as it is, and no ASCII character is a mark.
        return _WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", text.translate(_SEEN)).casefold()
    return _WORD.findall(unicodedata.normalize("NFKC", folded).translate(_LETTERS))


class _Without(dict[int, int | None]):
    def __init__(self, *categories: str, others: Mapping[int, int] | None = None) -> None:
        super().__init__(others or {})
        self._categories = categories

    def __missing__(self, code: int) -> int | None:
        kept = None if unicodedata.category(chr(code)) in self._categories else code
        return self.setdefault(code, kept)


_SEEN = _Without("Cf")
_LETTERS = _Without(
    # `re` does not count marks as letters, so they would split words; composed letters stay.
    *("Mn", "Mc", "Me"),
    others={ord(sign): ord(operator) for operator, signs in _SIGNS.items() for sign in signs},
)


def _prompt(text: str | Prompt) -> Prompt:
    return Prompt(words_of(text)) if isinstance(text, str) else text


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])


Row = SFTRow | RLRow | PreferenceRow


Rows = StoredRows[Any] | Sequence[Row]
"""Rows of one split; they are iterated twice."""


@dataclass(frozen=True)
class Leak:
    """A training row and a held-out row of its best match, exact or longest; rows count from 0.

    `kind` is `exact` (all words of both texts, templates aside) or `run`; `words` are normalized;
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
    """The training rows that share words with held-out rows, and how many there are.

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


def find_leaks(
    training: Mapping[str, Rows],
    held_out: Mapping[str, Rows],
    config: DecontaminationConfig,
) -> LeakReport:
    """Compare every training row with all held-out rows, given by split; return the leaks.

    Raises:
        ConfigError: there are leaks and `action` is `refuse`, or all rows of a split leak.
    """
    prompts = {split: (prompt for _, prompt in _prompts(rows)) for split, rows in held_out.items()}
    index = EvaluationIndex(prompts, config.num_words, config.min_words)
    leaks = tuple(
        leak for split, rows in training.items() for leak in _leaks_of(split, rows, index)
    )
    if leaks and config.action == "refuse":
        first = leaks[0]
        raise ConfigError(
            "data.decontamination",
            f"got {len(leaks)} training rows that share words with held-out ones (first: "
            f"{first.split} row {first.row} and {first.evaluation_split} row "
            f"{first.evaluation_row}: {first.words!r:.200}); need none; remove them, or set "
            "data.decontamination.action=remove",
        )
    num_leaked = {split: sum(leak.split == split for leak in leaks) for split in training}
    for split, rows in training.items():
        if 0 < num_leaked[split] == len(rows):
            raise ConfigError(
                f"data.{split}",
                f"got {len(rows)} rows, all of which share words with held-out ones; need at "
                "least 1 other; use other data, or raise data.decontamination.num_words",
            )
    return LeakReport(
        num_words=config.num_words,
        min_words=config.min_words,
        num_rows={split: len(rows) for split, rows in (*training.items(), *held_out.items())},
        num_leaked=num_leaked,
        leaks=leaks,
    )


def _leaks_of(split: str, rows: Rows, index: EvaluationIndex) -> Iterator[Leak]:
    for number, (row, prompt) in enumerate(_prompts(rows)):
        found = [*index.shared(prompt)]
        for message in row.messages[len(row.prompt) :]:
            found += index.shared(message.said, is_answer=message.role != "user")
        if not found:
            continue
        kind, words, places = next((each for each in found if each[0] == "exact"), found[0])
        num_rows = len({place for _, _, places in found for place in places})
        yield Leak(split, number, kind, words, *places[0], num_rows)


def _prompts(rows: Rows) -> Iterator[tuple[Row, Prompt]]:
    templates: dict[str, _Template] = {}
    for row in rows:
        words = _words(row)
        templates.setdefault(row.data_source, _Template(words)).add(words)
    for row in rows:
        yield row, Prompt(_words(row), *templates[row.data_source].lengths)


def _words(row: Row) -> list[str]:
    return words_of("\n".join(each.said for each in row.prompt if each.role != "system"))


class _Template:
    """Finds the words with which all prompts of a source begin and end, in constant memory."""

    def __init__(self, words: list[str]) -> None:
        self._start, self._reversed_end, self._shortest = words, words[::-1], len(words)
        self._different: set[tuple[str, ...]] = set()

    def add(self, words: list[str]) -> None:
        self._start = list(commonprefix([self._start, words]))
        self._reversed_end = list(commonprefix([self._reversed_end, words[::-1]]))
        self._shortest = min(self._shortest, len(words))
        if len(self._different) < MIN_TEMPLATE_ROWS:
            self._different.add(tuple(words))

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of shared words at the start and the end; 0 and 0 if too few prompts differ."""
        if len(self._different) < MIN_TEMPLATE_ROWS:
            return 0, 0
        start = len(self._start)
        return start, min(len(self._reversed_end), self._shortest - start)
