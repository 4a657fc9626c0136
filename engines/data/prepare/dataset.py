"""Makes the dataset artifact: splits of validated rows, a summary, perhaps a tokenizer.

The layout of its files is that of `engines.data.read.dataset`.
Promises: equal configuration, sources and seed give byte-equal files; evaluation prompts do not
occur in the training splits unless `allow_overlap`; what was dropped is counted in the summary.
With `decontamination` its report says which training rows shared words with held-out ones.
Imports without torch and transformers, so the preprocess stage starts fast.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.leaks import LeakReport, find_leaks
from engines.data.prepare.sources import (
    SourceReport,
    load_preference_rows,
    load_rl_rows,
    load_sft_rows,
)
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.dataset import (
    DECONTAMINATION_FILE,
    EVALUATION_FILE,
    PREFERENCE_EVALUATION_FILE,
    PREFERENCE_FILE,
    RL_FILE,
    SFT_FILE,
    SUMMARY_FILE,
    TOKENIZER_DIR,
)
from engines.data.read.examples import rl_prompts, sft_examples
from engines.data.read.pairs import as_policy, read_pairs
from engines.data.read.row_files import write_preference_rows, write_rl_rows, write_sft_rows
from engines.data.read.rows import Message, PreferenceRow, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer, DirectoryTokenizer
from infra.errors import ConfigError

_SCHEMA_VERSION = 1
_PAIRS = {
    "preference": PREFERENCE_FILE,
    "preference_evaluation": PREFERENCE_EVALUATION_FILE,
}
"""Splits of pairs, which most data have not, and their files."""


@dataclass(frozen=True)
class SplitSummary:
    """One split in numbers.

    Attributes:
        num_rows: rows written.
        num_overlong: dropped because they are too long; None where no tokenizer was at hand,
            then the stage that reads the split counts.
        num_distinct_prompts: rows that differ in their prompt.
        data_sources: rows by data source.
        sources: what became of each source's rows; empty for generated data.
    """

    num_rows: int
    num_overlong: int | None
    num_distinct_prompts: int
    data_sources: dict[str, int]
    sources: tuple[SourceReport, ...] = ()


@dataclass(frozen=True)
class DatasetSummary:
    """The artifact in numbers.

    Attributes:
        sft: the supervised split.
        rl: the RL split.
        evaluation: the held-out split.
        num_overlapping: held-out rows whose prompt occurs in training.
        vocab_size: of the tokenizer trained here, else None.
        preference: pairs to train on; None where the data have none.
        preference_evaluation: pairs that are held out; likewise.
        num_decontaminated: rows left out since they share words with held-out ones, by split; None
            where nobody looked.
    """

    sft: SplitSummary
    rl: SplitSummary
    evaluation: SplitSummary
    num_overlapping: int
    vocab_size: int | None
    preference: SplitSummary | None = None
    preference_evaluation: SplitSummary | None = None
    num_decontaminated: Mapping[str, int] | None = None

    def to_json(self) -> str:
        """Text of summary.json; what the data have none of is not in it."""
        values = {name: value for name, value in asdict(self).items() if name not in self._absent}
        return json.dumps({"schema": _SCHEMA_VERSION, **values}, indent=2, sort_keys=True) + "\n"

    @property
    def _absent(self) -> set[str]:
        return {name for name in (*_PAIRS, "num_decontaminated") if getattr(self, name) is None}


@dataclass(frozen=True)
class Splits:
    """The rows of the splits, and the reports of their sources."""

    sft: tuple[SFTRow, ...]
    rl: tuple[RLRow, ...]
    evaluation: tuple[RLRow, ...]
    reports: dict[str, tuple[SourceReport, ...]]
    preference: tuple[PreferenceRow, ...] = ()
    preference_evaluation: tuple[PreferenceRow, ...] = ()


def build_dataset(
    data: DataConfig,
    model: ModelConfig | None,
    seed: int,
    out_dir: Path,
    tokenizer: ChatTokenizer | None = None,
) -> DatasetSummary:
    """Generate or read the data, check it, and write the artifact's files.

    Args:
        data: where rows come from.
        model: `init: random` gets a tokenizer trained on the data; None: of any.
        seed: of generation and sampling.
        out_dir: created if it does not exist.
        tokenizer: of a pretrained model, to check lengths now; None leaves that to later stages.

    Returns:
        What summary.json holds.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    splits, leaks = _decontaminated(_read_splits(data, seed), data)
    num_overlapping = _check_overlap(splits, data.allow_overlap)
    out_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = None
    if model and model.init == "random":
        directory = train_tokenizer(
            model.tokenizer,
            _texts(splits),
            out_dir / TOKENIZER_DIR,
            max_length=model.max_length,
            chat_template=model.chat_template,
        )
        trained = DirectoryTokenizer.load(directory)
        tokenizer, vocab_size = trained, len(trained)
    kept = _drop_overlong(splits, data, model, tokenizer) if tokenizer and model else splits
    write_sft_rows(out_dir / SFT_FILE, kept.sft)
    write_rl_rows(out_dir / RL_FILE, kept.rl)
    write_rl_rows(out_dir / EVALUATION_FILE, kept.evaluation)
    for name, file in _PAIRS.items():
        if rows := getattr(kept, name):
            write_preference_rows(out_dir / file, rows)
    checked = tokenizer is not None
    summary = DatasetSummary(
        sft=_summarize(splits.sft, kept.sft, splits.reports["sft"], checked),
        rl=_summarize(splits.rl, kept.rl, splits.reports["rl"], checked),
        evaluation=_summarize(
            splits.evaluation, kept.evaluation, splits.reports["evaluation"], checked
        ),
        num_overlapping=num_overlapping,
        vocab_size=vocab_size,
        **{
            name: _summarize(rows, getattr(kept, name), splits.reports[name], checked)
            for name in _PAIRS
            if (rows := getattr(splits, name))
        },
        num_decontaminated=leaks.num_leaked if leaks else None,
    )
    if leaks:
        _write_text(out_dir / DECONTAMINATION_FILE, leaks.to_json())
    _write_text(out_dir / SUMMARY_FILE, summary.to_json())
    return summary


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def _read_splits(data: DataConfig, seed: int) -> Splits:
    if data.arithmetic:
        made = generate(data.arithmetic, seed)
        reports = dict.fromkeys(("sft", "rl", "evaluation", *_PAIRS), ())
        pairs = {name: getattr(made, name) for name in _PAIRS}
        return Splits(made.sft, made.rl, made.evaluation, reports, **pairs)
    sft = load_sft_rows(data.sft, "sft", data, seed)
    rl = load_rl_rows(data.rl, "rl", data, seed)
    evaluation = load_rl_rows(data.evaluation, "evaluation", data, seed)
    reports = {"sft": sft.reports, "rl": rl.reports, "evaluation": evaluation.reports}
    pairs = {}
    for name in _PAIRS:
        loaded = load_preference_rows(getattr(data, name), name, data, seed)
        pairs[name], reports[name] = loaded.rows, loaded.reports
    return Splits(sft.rows, rl.rows, evaluation.rows, reports, **pairs)


def _decontaminated(splits: Splits, data: DataConfig) -> tuple[Splits, LeakReport | None]:
    """The splits without training rows that share words with held-out ones, and the report."""
    if data.decontamination is None:
        return splits, None
    training = {name: getattr(splits, name) for name in ("sft", "rl", "preference")}
    held_out = {name: getattr(splits, name) for name in ("evaluation", "preference_evaluation")}
    leaks = find_leaks(training, held_out, data.decontamination)
    kept = {}
    for name, rows in training.items():
        leaked = leaks.rows_of(name)
        kept[name] = tuple(row for number, row in enumerate(rows) if number not in leaked)
    return replace(splits, **kept), leaks


def _check_overlap(splits: Splits, allow_overlap: bool) -> int:
    """Held-out rows whose prompt a training split holds; more than none needs permission."""
    trained: dict[tuple[Message, ...], str] = {}
    training = (("rl", splits.rl), ("sft", splits.sft), ("preference", splits.preference))
    for split, rows in training:
        for index, row in enumerate(rows):
            trained.setdefault(_identity(row.prompt), f"{split} row {index}")
    num_found = 0
    held_out = (
        ("evaluation", splits.evaluation),
        ("preference_evaluation", splits.preference_evaluation),
    )
    for split, rows in held_out:
        found = [
            (index, trained[_identity(row.prompt)])
            for index, row in enumerate(rows)
            if _identity(row.prompt) in trained
        ]
        if found and not allow_overlap:
            index, place = found[0]
            prompts = "prompt occurs" if len(found) == 1 else "prompts occur"
            raise ConfigError(
                f"data.{split}",
                f"{len(found)} eval {prompts} in train (first: row {index} = {place}); remove "
                "them, or set data.allow_overlap",
            )
        num_found += len(found)
    return num_found


def _identity(prompt: Sequence[Message]) -> tuple[Message, ...]:
    """A prompt without the white space around its messages."""
    return tuple(Message(message.role, message.content.strip()) for message in prompt)


def _texts(splits: Splits) -> Iterator[str]:
    """Everything a model made from scratch will read or write."""
    for row in splits.sft:
        yield from (message.content for message in row.messages)
        # The other roles have tokens of their own in the template of a model made from scratch.
        yield from (f"<|{message.role}|>" for message in row.messages if message.role == "tool")
    for row in (*splits.rl, *splits.evaluation):
        yield from (message.content for message in row.prompt)
        if isinstance(row.reward_model.ground_truth, str):
            yield row.reward_model.ground_truth
    for row in (*splits.preference, *splits.preference_evaluation):
        yield from (message.content for message in row.prompt)
        yield from (row.chosen, row.rejected)


def _drop_overlong(
    splits: Splits, data: DataConfig, model: ModelConfig, tokenizer: ChatTokenizer
) -> Splits:
    def prompts(rows: tuple[RLRow, ...]) -> tuple[RLRow, ...]:
        if not rows:
            return rows
        kept = rl_prompts(rows, tokenizer, data.max_prompt_length, data.on_overlong)
        return tuple(prompt.row for prompt in kept)

    sft = splits.sft
    if sft:
        kept = sft_examples(sft, tokenizer, model.max_length, data.on_overlong)
        sft = tuple(sft[index] for index in kept.indices)
    pairs = {}
    for name in _PAIRS:
        rows = getattr(splits, name)
        read = read_pairs(rows, tokenizer, model.max_length, as_policy, data.on_overlong)
        pairs[name] = tuple(rows[pair.index] for pair in read)
    return Splits(sft, prompts(splits.rl), prompts(splits.evaluation), splits.reports, **pairs)


def _summarize(
    before: Sequence[SFTRow] | Sequence[RLRow] | Sequence[PreferenceRow],
    rows: Sequence[SFTRow] | Sequence[RLRow] | Sequence[PreferenceRow],
    reports: tuple[SourceReport, ...],
    checked: bool,
) -> SplitSummary:
    data_sources = Counter(row.data_source for row in rows)
    return SplitSummary(
        num_rows=len(rows),
        num_overlong=len(before) - len(rows) if checked else None,
        num_distinct_prompts=len({_identity(row.prompt) for row in rows}),
        data_sources=dict(sorted(data_sources.items())),
        sources=reports,
    )
