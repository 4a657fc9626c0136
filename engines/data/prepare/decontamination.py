"""Which training texts occur in evaluation sets: whole, or as a run of words.

    index = EvaluationIndex({"gsm8k": texts, ...})
    report = index.report(training_texts)

Words are compared, not characters: case, white space, width of letters, punctuation and marks that
form no letter of their own do not count. What tells problems apart does: the point inside a number,
and an operator before one (`3 + 4` is not `3 * 4`). In scripts without spaces each character is a
word.
A text of the evaluation is found in a training text if they share `num_words` words in a row; a
shorter one if all of its words occur in a row. 13 words, and 8 as the fewest, are those of GPT-3
(arXiv:2005.14165, appendix C); below 8, where chance hits are many, only equal texts count.
Promises: every such run is found, and nothing else; memory is bounded by the evaluation texts,
training texts are read once and not kept; equal inputs give equal reports.
Does not promise: to find a paraphrase, or to tell a leak from a template that all problems share:
give the texts without it.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

NUM_WORDS = 13
MIN_WORDS = 8
_SCHEMA_VERSION = 1
_WITHOUT_SPACES = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, Kana and Han."""
_WORD = re.compile(
    rf"\d+(?:\.\d+)*|[{_WITHOUT_SPACES}]|[^\W\d_{_WITHOUT_SPACES}]+|[-+*/%^=<>×÷−](?=\s*\d)"
)


@dataclass(frozen=True)
class SharedText:
    """A training text and a text of an evaluation that share words.

    Attributes:
        training_row: number of the training text, from 0.
        evaluation_row: number within its source, from 0.
        kind: `exact` (all words of both) or `run`.
        words: the first ones that they share, as they were compared.
    """

    training_row: int
    evaluation_row: int
    kind: Literal["exact", "run"]
    words: str


@dataclass(frozen=True)
class SourceOverlap:
    """One evaluation source.

    Attributes:
        data_source: its name.
        num_rows: of the source.
        num_exact: of them whose words are those of a training text.
        num_shared: of them that share a run of words or all words with a training text.
        num_training_rows: training texts that share them.
        first: the first pairs, by training row.
    """

    data_source: str
    num_rows: int
    num_exact: int
    num_shared: int
    num_training_rows: int
    first: tuple[SharedText, ...]


@dataclass(frozen=True)
class DecontaminationReport:
    """What training and evaluation share.

    Attributes:
        num_words: of a run.
        num_training_rows: training texts that were read.
        num_shared_training_rows: of them that share words with any source.
        sources: in the order in which they were given.
    """

    num_words: int
    num_training_rows: int
    num_shared_training_rows: int
    sources: tuple[SourceOverlap, ...]

    def to_json(self) -> str:
        """Text of a file; equal reports give equal bytes."""
        values = {"schema": _SCHEMA_VERSION, **asdict(self)}
        return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


Place = tuple[str, int]
"""Source and row of a text of the evaluation."""


class EvaluationIndex:
    """The runs of words of evaluation texts.

    Args:
        evaluation: texts by source; what has no word is never found.
        num_words: of a run.
        min_words: of a text that is shorter than a run and yet looked for inside others.

    Raises:
        ValueError: a run of less than one word.
    """

    def __init__(
        self,
        evaluation: Mapping[str, Sequence[str]],
        num_words: int = NUM_WORDS,
        min_words: int = MIN_WORDS,
    ) -> None:
        if num_words < 1:
            raise ValueError(f"num_words: got {num_words}; need >= 1")
        self._num_words = num_words
        self._num_rows = {source: len(texts) for source, texts in evaluation.items()}
        # Dicts without values keep the order of the rows, sets would not.
        runs: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        exact: defaultdict[str, list[Place]] = defaultdict(list)
        lengths: set[int] = set()
        for source, texts in evaluation.items():
            for row, text in enumerate(texts):
                words = words_of(text)
                if words:
                    exact[" ".join(words)].append((source, row))
                length = min(num_words, len(words))
                if length >= max(1, min(num_words, min_words)):
                    lengths.add(length)
                    for run in _runs(words, length):
                        runs[run][source, row] = None
        self._runs = {run: tuple(places) for run, places in runs.items()}
        self._exact = {words: tuple(places) for words, places in exact.items()}
        self._lengths = sorted(lengths, reverse=True)

    def shared(self, text: str) -> Iterator[tuple[Literal["exact", "run"], str, tuple[Place, ...]]]:
        """What a training text shares with the evaluation; nothing, if it is clean.

        Args:
            text: of a training row.

        Yields:
            tuple[Literal['exact', 'run'], str, tuple[Place, ...]]: kind, shared words, and the
                texts that hold them: all words first, then runs from the longest, in the order of
                the text.
        """
        words = words_of(text)
        whole = " ".join(words)
        if whole in self._exact:
            yield "exact", whole, self._exact[whole]
        for length in self._lengths:
            for run in dict.fromkeys(_runs(words, length)):
                if run in self._runs:
                    yield "run", run, self._runs[run]

    def report(self, training: Iterable[str], num_shown: int = 5) -> DecontaminationReport:
        """Compare every training text.

        Args:
            training: texts, read once.
            num_shown: pairs that the report shows of each source.

        Returns:
            The report.
        """
        tallies = {source: _Tally(num_shown) for source in self._num_rows}
        num_training_rows = num_shared = 0
        for row, text in enumerate(training):
            num_training_rows += 1
            found = False
            for kind, words, places in self.shared(text):
                found = True
                for source, evaluation_row in places:
                    tallies[source].add(SharedText(row, evaluation_row, kind, words))
            num_shared += found
        return DecontaminationReport(
            self._num_words,
            num_training_rows,
            num_shared,
            tuple(tallies[source].overlap(source, num) for source, num in self._num_rows.items()),
        )


class _Tally:
    """Counts what one source shares, in memory bounded by the source."""

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._exact: set[int] = set()
        self._shared: set[int] = set()
        self._num_training_rows = 0
        self._last_training_row = -1
        self._first: dict[tuple[int, int], SharedText] = {}

    def add(self, pair: SharedText) -> None:
        """One pair; those of a training row come one after the other."""
        self._shared.add(pair.evaluation_row)
        if pair.kind == "exact":
            self._exact.add(pair.evaluation_row)
        self._num_training_rows += pair.training_row != self._last_training_row
        self._last_training_row = pair.training_row
        if len(self._first) < self._num_shown:
            self._first.setdefault((pair.training_row, pair.evaluation_row), pair)

    def overlap(self, source: str, num_rows: int) -> SourceOverlap:
        """What was counted."""
        return SourceOverlap(
            source,
            num_rows,
            len(self._exact),
            len(self._shared),
            self._num_training_rows,
            tuple(self._first.values()),
        )


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared.

    Args:
        text: any Unicode text.

    Returns:
        Its words, compatible forms and case folded (Unicode's NFKC and casefold).
    """
    if text.isascii():
        # Each is compatible with itself alone, and none is a mark.
        return _WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    # Marks are no letters to `re` and would cut words; letters that hold theirs are untouched.
    letters = "".join(each for each in folded if not unicodedata.category(each).startswith("M"))
    return _WORD.findall(letters)


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    """Every run of so many words, from the first."""
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])
