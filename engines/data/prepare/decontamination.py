"""Which training texts occur in evaluation sets: whole, or as a run of words.

    index = EvaluationIndex({"gsm8k": texts, ...})
    report = index.report(training_texts)

Words are compared, not characters: case, white space, width of letters, punctuation and marks that
form no letter of their own do not count, nor does what is not seen (soft hyphens). What tells
problems apart does: the point inside a number, and an operator before one (`3 + 4` is not `3 * 4`,
which is `3 × 4`). In scripts without spaces each character is a word.
A text of the evaluation is found in a training text if they share `num_words` words in a row; a
shorter one if all of its words occur in a row. 13 words, and 8 as the fewest, are those of GPT-3
(arXiv:2005.14165, appendix C); below 8, where chance hits are many, only equal prompts count.
A prompt in a template is two texts: the whole equals another whole or what is in its template; of
runs those count that the template alone does not have.
Promises: every such run is found, and nothing else; memory is bounded by the evaluation texts,
training texts are read once and not kept; equal inputs give equal reports.
Does not promise: to find a paraphrase, or a template: whoever knows the words that all problems
share says how many they are.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

NUM_WORDS = 13
MIN_WORDS = 8
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
"""Signs that are written for an operator; Unicode's compatibility leaves them."""


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


@dataclass(frozen=True)
class Prompt:
    """The words of a prompt, as `words_of` gives them, and those of its template among them.

    Attributes:
        words: all.
        num_before: words of the template in front of the rest.
        num_after: and behind it; together no more than all.
    """

    words: list[str]
    num_before: int = 0
    num_after: int = 0

    @property
    def own(self) -> list[str]:
        """The words without the template."""
        return self.words[self.num_before : len(self.words) - self.num_after]

    @property
    def forms(self) -> Iterable[list[str]]:
        """The words, and those without the template; each once, none without words."""
        own = self.own
        return filter(None, (self.words, own) if len(own) < len(self.words) else (own,))


Place = tuple[str, int]
"""Source and row of a text of the evaluation."""
Shared: TypeAlias = tuple[Literal["exact", "run"], str, tuple[Place, ...]]
"""Kind, shared words, and the texts of the evaluation that hold them."""


class EvaluationIndex:
    """The runs of words of evaluation texts.

    Args:
        evaluation: prompts by source, read once; what has no word is never found.
        num_words: of a run.
        min_words: of a text that is shorter than a run and yet looked for inside others, or equal
            to an answer.

    Raises:
        ValueError: a run of less than one word.
    """

    def __init__(
        self,
        evaluation: Mapping[str, Iterable[str | Prompt]],
        num_words: int = NUM_WORDS,
        min_words: int = MIN_WORDS,
    ) -> None:
        if num_words < 1:
            raise ValueError(f"num_words: got {num_words}; need >= 1")
        self._num_words = num_words
        self._min_words = max(1, min(num_words, min_words))
        self._num_rows = dict.fromkeys(evaluation, 0)
        # Dicts without values keep the order of the rows, sets would not.
        runs: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        exact: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        lengths: set[int] = set()
        for source, texts in evaluation.items():
            for row, text in enumerate(texts):
                self._num_rows[source] += 1
                prompt = _prompt(text)
                for words in prompt.forms:
                    exact[" ".join(words)][source, row] = None
                for length, run in self._runs_of(prompt):
                    lengths.add(length)
                    runs[run][source, row] = None
        self._runs = {run: tuple(places) for run, places in runs.items()}
        self._exact = {words: tuple(places) for words, places in exact.items()}
        self._lengths = sorted(lengths, reverse=True)

    def _runs_of(self, prompt: Prompt) -> Iterator[tuple[int, str]]:
        """What of a prompt is looked for inside texts, with its number of words.

        Where the words without the template are too few, they are together with words of it.
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
        """What a training text shares with the evaluation; nothing, if it is clean.

        Args:
            text: of a training row.
            is_answer: it is no prompt, so that few words which equal a prompt are chance.

        Yields:
            Shared: all words first, then runs from the longest, in the order of the text.
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
    seen = text.translate(_SEEN)
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold())
    return _WORD.findall(folded.translate(_LETTERS))


class _Without(dict[int, int | None]):
    """A table of `str.translate` that drops the characters of some categories of Unicode.

    Args:
        *categories: of which a character is dropped.
        others: what further characters become.
    """

    def __init__(self, *categories: str, others: Mapping[int, int] | None = None) -> None:
        super().__init__(others or {})
        self._categories = categories

    def __missing__(self, code: int) -> int | None:
        kept = None if unicodedata.category(chr(code)) in self._categories else code
        return self.setdefault(code, kept)


_SEEN = _Without("Cf")
_LETTERS = _Without(
    # Marks are no letters to `re` and would cut words; letters that hold theirs are untouched.
    *("Mn", "Mc", "Me"),
    others={ord(sign): ord(operator) for operator, signs in _SIGNS.items() for sign in signs},
)


def _prompt(text: str | Prompt) -> Prompt:
    return Prompt(words_of(text)) if isinstance(text, str) else text


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    """Every run of so many words, from the first."""
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])
