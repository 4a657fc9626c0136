"""Make the dataset artifact in the layout of `engines.data.read.dataset`.

Rows that are too long for the model are dropped or refused, by the same rules and errors as in the
training stages. An image counts with the tokens that the model's processor gives its size. If that
is unknown (a text model, or no processor configuration), rows with images stay, and the stage that
reads them refuses them or the model.

Promises: equal configuration, sources and seed give byte-equal files. Evaluation prompts do not
occur in the training splits unless `allow_overlap`. Dropped rows are counted in the summary.
Memory grows with the held-out rows, by a few bytes per training row, and with the largest .json
file, which is read whole. Imports neither torch nor transformers, so the stage
starts fast.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.image_store import image_size, write_images
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.decontamination import LeakReport, find_leaks
from engines.data.prepare.sources import ROW_KINDS, SourceReport, load_rows
from engines.data.prepare.stored_rows import StoredRows, image_folder, prompt_digest, stored
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.chat import render_conversations, render_prompts
from engines.data.read.dataset import (
    DECONTAMINATION_FILE,
    EVALUATION_FILE,
    IMAGES_FILE,
    PREFERENCE_EVALUATION_FILE,
    PREFERENCE_FILE,
    RL_FILE,
    SFT_FILE,
    SUMMARY_FILE,
    TOKENIZER_DIR,
)
from engines.data.read.examples import (
    CONVERSATIONS,
    PAIRS,
    PROMPTS,
    pair_lengths,
    refuse_empty,
    within,
)
from engines.data.read.row_files import in_batches, write_batches
from engines.data.read.rows import RLRow, RowError
from engines.data.read.tokenizer import ChatTokenizer, DirectoryTokenizer
from engines.vision.sizes import ImageSizes
from infra.errors import ConfigError

FindImageSizes = Callable[[], ImageSizes | None]
"""Called when a row has an image; returns None if the model's size rules are unknown."""
_SCHEMA_VERSION = 1
_FILES = {
    "sft": SFT_FILE,
    "rl": RL_FILE,
    "evaluation": EVALUATION_FILE,
    "preference": PREFERENCE_FILE,
    "preference_evaluation": PREFERENCE_EVALUATION_FILE,
}
_PAIRS = ("preference", "preference_evaluation")
"""Splits that are left out if they are empty."""
_HELD_OUT = ("evaluation", "preference_evaluation")
Splits = Mapping[str, StoredRows[Any]]
"""The rows of each split, in the order of `ROW_KINDS`."""
Suites = Mapping[str, Sequence[RLRow]]
"""Held-out rows of a recipe's suites, by the section that configures their data."""
NO_SUITES: Suites = MappingProxyType({})


@dataclass(frozen=True)
class SplitSummary:
    """Statistics of one split.

    `num_overlong` counts rows dropped as too long; None if there was no tokenizer, so that later
    stages check them. `sources` has a report per configured source, none for generated data.
    """

    num_rows: int
    num_overlong: int | None
    num_distinct_prompts: int
    data_sources: dict[str, int]
    sources: tuple[SourceReport, ...] = ()


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of the artifact; an optional field is None if the artifact has no such part.

    Attributes:
        num_overlapping: held-out rows whose prompt occurs in training.
        num_decontaminated: rows removed since they share words with held-out ones, by split.
        num_images: distinct images.
    """

    sft: SplitSummary
    rl: SplitSummary
    evaluation: SplitSummary
    num_overlapping: int
    vocab_size: int | None
    preference: SplitSummary | None = None
    preference_evaluation: SplitSummary | None = None
    num_decontaminated: Mapping[str, int] | None = None
    num_images: int | None = None

    def to_json(self) -> str:
        """Return the text of summary.json, without absent parts."""
        optional = (*_PAIRS, "num_decontaminated", "num_images")
        values = {k: v for k, v in asdict(self).items() if v is not None or k not in optional}
        return json.dumps({"schema": _SCHEMA_VERSION, **values}, indent=2, sort_keys=True) + "\n"


def build_dataset(
    data: DataConfig,
    model: ModelConfig | None,
    seed: int,
    out_dir: Path,
    tokenizer: ChatTokenizer | None = None,
    suites: Suites = NO_SUITES,
    find_sizes: FindImageSizes | None = None,
) -> DatasetSummary:
    """Generate or read the data, check it, and write the artifact's files.

    Args:
        model: with `init: random` a tokenizer is trained on the data; None: data for any model.
        tokenizer: a pretrained model's, to check lengths now; None leaves this to later stages.
        suites: further held-out rows that training rows must not repeat.
        find_sizes: finds a vision model's size rules; None leaves this to later stages.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="rows-", dir=out_dir.parent) as scratch:
        splits, reports = _read_splits(data, seed, Path(scratch))
        splits, leaks = _decontaminated(splits, data, suites)
        num_overlapping = _check_overlap(splits, data.allow_overlap, suites)
        out_dir.mkdir(exist_ok=True)
        trained = None
        if model and model.init == "random":
            tokenizer = trained = _trained_tokenizer(splits, model, out_dir)
        kept = splits
        if tokenizer and model:
            kept = _without_overlong(splits, data, model.max_length, tokenizer, find_sizes)
        num_images = _write_rows(kept, out_dir)
        summary = DatasetSummary(
            **{
                name: SplitSummary(
                    num_rows=len(rows),
                    num_overlong=len(splits[name]) - len(rows) if tokenizer is not None else None,
                    num_distinct_prompts=rows.num_distinct_prompts(),
                    data_sources=rows.num_by_source(),
                    sources=reports[name],
                )
                for name, rows in kept.items()
                if name not in _PAIRS or len(splits[name])
            },
            num_overlapping=num_overlapping,
            vocab_size=None if trained is None else len(trained),
            num_decontaminated=leaks.num_leaked if leaks else None,
            num_images=num_images or None,
        )
    for name, content in ((DECONTAMINATION_FILE, leaks), (SUMMARY_FILE, summary)):
        if content is not None:
            (out_dir / name).write_text(content.to_json(), encoding="utf-8", newline="")
    return summary


def _read_splits(
    data: DataConfig, seed: int, scratch: Path
) -> tuple[Splits, Mapping[str, tuple[SourceReport, ...]]]:
    """Generate or read the rows into `scratch`; missing splits are empty."""
    if data.arithmetic:
        rows = {
            name: stored(scratch / f"{name}.arrow", ROW_KINDS[name].format, made)
            for name, made in generate(data.arithmetic, seed).items()
        }
        return rows, dict.fromkeys(rows, ())
    loaded = {
        name: load_rows(getattr(data, name), name, data, seed, scratch, kind)
        for name, kind in ROW_KINDS.items()
    }
    return (
        {name: rows for name, (rows, _) in loaded.items()},
        {name: reports for name, (_, reports) in loaded.items()},
    )


def _decontaminated(
    splits: Splits, data: DataConfig, suites: Suites
) -> tuple[Splits, LeakReport | None]:
    """Remove the training rows that share words with held-out rows or `suites` (`find_leaks`).

    The report is None if `data.decontamination` is null.
    """
    if data.decontamination is None:
        return splits, None
    training = {name: rows for name, rows in splits.items() if name not in _HELD_OUT}
    held_out = {name: splits[name] for name in _HELD_OUT} | {**suites}
    leaks = find_leaks(training, held_out, data.decontamination)
    kept = dict(splits)
    for name, rows in training.items():
        leaked = [leak.row for leak in leaks.leaks if leak.split == name]
        kept[name] = rows.only(np.delete(np.arange(len(rows)), leaked))
    return kept, leaks


def _check_overlap(splits: Splits, allow_overlap: bool, suites: Suites) -> int:
    """Count the held-out rows, `suites` included, whose prompt occurs in a training split.

    Raises:
        ConfigError: there are such rows and `allow_overlap` is false; names the first.
    """
    held_out = {f"data.{name}": [*splits[name].prompt_digests()] for name in _HELD_OUT} | {
        name: [prompt_digest(row.prompt) for row in rows] for name, rows in suites.items()
    }
    wanted = {digest for digests in held_out.values() for digest in digests}
    trained: dict[bytes, str] = {}
    for name in ("rl", "sft", "preference"):
        for row, digest in enumerate(splits[name].prompt_digests()):
            if digest in wanted:
                trained.setdefault(digest, f"{name} row {row}")
    num_found = 0
    for field, digests in held_out.items():
        found = [row for row, digest in enumerate(digests) if digest in trained]
        if found and not allow_overlap:
            prompts = "prompt occurs" if len(found) == 1 else "prompts occur"
            raise ConfigError(
                field,
                f"{len(found)} eval {prompts} in train (first: row {found[0]} = "
                f"{trained[digests[found[0]]]}); remove them, or set data.allow_overlap",
            )
        num_found += len(found)
    return num_found


def _texts(splits: Splits) -> Iterator[str]:
    """Yield all texts that a model made from scratch will read or write."""
    for name, rows in splits.items():
        for row in rows:
            for message in row.messages:
                yield message.said
                yield from message.tools
            if name == "sft":
                # The template of such a model has special tokens for all other roles.
                yield from (f"<|{each.role}|>" for each in row.messages if each.role == "tool")
            elif name not in _PAIRS and isinstance(row.reward_model.ground_truth, str):
                yield row.reward_model.ground_truth


def _trained_tokenizer(splits: Splits, model: ModelConfig, out_dir: Path) -> DirectoryTokenizer:
    for name in ("rl", "evaluation"):
        if next(splits[name].images(), None) is not None:
            raise ConfigError(
                "model.init",
                f"got random; rows of data.{name} show images, which a model made from scratch "
                "does not see; need a pretrained one; set model.path",
            )
    return DirectoryTokenizer.load(
        train_tokenizer(
            model.tokenizer,
            _texts(splits),
            out_dir / TOKENIZER_DIR,
            max_length=model.max_length,
            chat_template=model.chat_template,
        )
    )


def _write_rows(splits: Splits, out_dir: Path) -> int:
    for name, rows in splits.items():
        if name not in _PAIRS or len(rows):
            write_batches(out_dir / _FILES[name], rows.format, rows.batches(), rows.is_plain)
    digests = chain(splits["rl"].images(), splits["evaluation"].images())
    return write_images(out_dir / IMAGES_FILE, image_folder(splits["rl"].path), digests)


def _without_overlong(
    splits: Splits,
    data: DataConfig,
    max_length: int,
    tokenizer: ChatTokenizer,
    find_sizes: FindImageSizes | None,
) -> Splits:
    """Return the splits without the rows that are too long, in order.

    Raises:
        ConfigError: a row is too long and `data.on_overlong` is `error`, a split becomes empty, or
            the model does not support an image's shape.
    """
    kept = dict(splits)
    for name, rows in splits.items():
        if not len(rows):
            continue
        limit, what = max_length, PAIRS if name in _PAIRS else CONVERSATIONS
        lengths = _lengths(name, rows, tokenizer, find_sizes)
        if name in ("rl", "evaluation"):
            refuse_empty(lengths)
            limit, what = data.max_prompt_length, PROMPTS
        kept[name] = rows.only(within(lengths, limit, data.on_overlong, what))
    return kept


def _lengths(
    name: str,
    rows: StoredRows[Any],
    tokenizer: ChatTokenizer,
    find_sizes: FindImageSizes | None,
) -> "array[int]":
    found = array("q")
    try:
        for batch in in_batches(rows):
            if name == "sft":
                rendered = render_conversations(tokenizer, [row.messages for row in batch])
                found.extend(len(each.input_ids) for each in rendered)
            elif name in _PAIRS:
                found.extend(pair_lengths(batch, tokenizer))
            else:
                folder = image_folder(rows.path)
                found.extend(_prompt_lengths(batch, tokenizer, folder, find_sizes))
    except RowError as error:
        raise ConfigError(f"data.{name}", f"row {len(found)} of the split: {error}") from None
    return found


def _prompt_lengths(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    folder: Path,
    find_sizes: FindImageSizes | None,
) -> Iterator[int]:
    """Yield each prompt's number of tokens, with those of its images; 1 if that is unknown."""
    rules = find_sizes() if find_sizes and any(row.images for row in rows) else None
    known = [row.prompt for row in rows if rules or not row.images]
    texts = iter(render_prompts(tokenizer, known))
    for row in rows:
        if not row.images:
            yield len(next(texts))
        elif rules is None:
            yield 1  # the row stays, whatever the limit
        else:
            names = [image.sha256 for image in row.images]
            sizes = [image_size((folder / name).read_bytes(), name) for name in names]
            yield len(next(texts)) + sum(rules.num_tokens(*size) - 1 for size in sizes)
