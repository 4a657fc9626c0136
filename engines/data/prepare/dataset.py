"""Make the dataset artifact in the layout of `engines.data.read.dataset`.

Promises: equal configuration, sources and seed give byte-equal files. Evaluation prompts do not
occur in the training splits unless `allow_overlap`. Dropped rows are counted in the summary.
Memory grows with the held-out rows, by a few bytes per training row, and with the largest .json
file, which is read whole. Imports neither torch nor transformers, so the stage starts fast.

Drop rows that are too long for the model, or refuse them.

Promises: the same rows and errors as in the training stages (`engines.data.read.examples`,
`engines.data.read.pairs`); memory holds one batch of token ids, and the length of each row.
An image counts with the tokens that the model's processor gives its size. If that is unknown (a
text model, or no processor configuration), rows with images stay, and the stage that reads them
refuses them or the model.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.image_store import ImageFolder, write_images
from engines.data.prepare.sources import SourceReport
from engines.data.prepare.splits import (
    NO_SUITES,
    Splits,
    Suites,
    check_overlap,
    decontaminated,
    read_splits,
)
from engines.data.prepare.stored_rows import StoredRows, image_folder
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
from engines.data.read.examples import OnOverlong, fitting_conversations, fitting_prompts
from engines.data.read.pairs import fitting_pairs, pair_lengths
from engines.data.read.row_files import RowT, in_batches, write_batches
from engines.data.read.rows import RLRow, RowError, SFTRow
from engines.data.read.tokenizer import ChatTokenizer, DirectoryTokenizer
from infra.errors import ConfigError

FindImageLength = Callable[[], Callable[[int, int], int] | None]
"""Called when a row has an image. Returns a function from width and height in pixels to the number
of placeholder tokens, which raises `RowError` for an unsupported shape; None if unknown.
"""

_FITS = 1
"""Length of a row that stays, whatever the limit."""


def without_overlong(
    splits: Splits,
    data: DataConfig,
    max_length: int,
    tokenizer: ChatTokenizer,
    image_length: FindImageLength | None = None,
) -> Splits:
    """Return the splits without the rows that are too long, in order.

    Limits are `max_length` (of `model`), for prompts `data.max_prompt_length`.

    Raises:
        ConfigError: a row is too long and `data.on_overlong` is `error`, a split becomes empty, or
            the model does not take an image's shape.
    """

    def fitting(
        split: str,
        rows: StoredRows[RowT],
        lengths: Callable[..., Iterable[int]],
        limit: int,
        choose: Callable[[Sequence[int], int, OnOverlong], list[int]],
    ) -> StoredRows[RowT]:
        if not len(rows):
            return rows
        found = _lengths(split, rows, partial(lengths, tokenizer=tokenizer))
        chosen = np.zeros(len(found), bool)
        chosen[choose(found, limit, data.on_overlong)] = True
        return rows.only(chosen)

    def fitting_of(split: str, rows: StoredRows[RLRow]) -> StoredRows[RLRow]:
        folder = image_folder(rows.path)
        lengths = partial(_of_prompts, folder=folder, image_length=image_length)
        return fitting(split, rows, lengths, data.max_prompt_length, fitting_prompts)

    return replace(
        splits,
        sft=fitting("sft", splits.sft, _of_conversations, max_length, fitting_conversations),
        preference=fitting(
            "preference", splits.preference, pair_lengths, max_length, fitting_pairs
        ),
        preference_evaluation=fitting(
            "preference_evaluation",
            splits.preference_evaluation,
            pair_lengths,
            max_length,
            fitting_pairs,
        ),
        rl=fitting_of("rl", splits.rl),
        evaluation=fitting_of("evaluation", splits.evaluation),
    )


def _lengths(
    split: str, rows: StoredRows[RowT], of_batch: Callable[[Sequence[RowT]], Iterable[int]]
) -> "array[int]":
    found = array("q")
    try:
        for batch in in_batches(rows):
            for length in of_batch(batch):
                found.append(length)
    except RowError as error:
        raise ConfigError(f"data.{split}", f"row {len(found)} of the split: {error}") from None
    return found


def _of_conversations(rows: Sequence[SFTRow], tokenizer: ChatTokenizer) -> Iterable[int]:
    rendered = render_conversations(tokenizer, [row.messages for row in rows])
    return (len(each.input_ids) for each in rendered)


def _of_prompts(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    folder: ImageFolder,
    image_length: FindImageLength | None,
) -> Iterator[int]:
    """Yield the tokens of prompts, with each placeholder counted as its image's tokens."""
    num_tokens = image_length() if image_length and any(row.images for row in rows) else None
    known = [row.prompt for row in rows if num_tokens or not row.images]
    texts = iter(render_prompts(tokenizer, known))
    for row in rows:
        if not row.images:
            yield len(next(texts))
        elif num_tokens is None:
            yield _FITS
        else:
            sizes = [folder.size(image.sha256) for image in row.images]
            yield len(next(texts)) + sum(num_tokens(*size) - 1 for size in sizes)


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
    """Statistics of the artifact; the optional ones are None if the data have no such part.

    Attributes:
        num_overlapping: held-out rows whose prompt occurs in training.
        num_decontaminated: by split, rows removed since they share words with held-out ones.
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
        values = {name: value for name, value in asdict(self).items() if name not in self._absent}
        return json.dumps({"schema": _SCHEMA_VERSION, **values}, indent=2, sort_keys=True) + "\n"

    @property
    def _absent(self) -> set[str]:
        return {
            name
            for name in (*_PAIRS, "num_decontaminated", "num_images")
            if getattr(self, name) is None
        }


def build_dataset(
    data: DataConfig,
    model: ModelConfig | None,
    seed: int,
    out_dir: Path,
    tokenizer: ChatTokenizer | None = None,
    suites: Suites = NO_SUITES,
    image_length: FindImageLength | None = None,
) -> DatasetSummary:
    """Generate or read the data, check it, and write the artifact's files.

    Args:
        model: with `init: random` a tokenizer is trained on the data; None: data for any model.
        tokenizer: of a pretrained model, to check lengths now; None leaves this to later stages.
        suites: further held-out rows that training rows must not repeat.
        image_length: of a vision model; None leaves prompts with images to later stages.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="rows-", dir=out_dir.parent) as scratch:
        splits, leaks = decontaminated(read_splits(data, seed, Path(scratch)), data, suites)
        num_overlapping = check_overlap(splits, data.allow_overlap, suites)
        out_dir.mkdir(exist_ok=True)
        _refuse_images(splits, model)
        trained = _trained_tokenizer(splits, model, out_dir)
        tokenizer = tokenizer if trained is None else trained
        kept = splits
        if tokenizer and model:
            kept = without_overlong(splits, data, model.max_length, tokenizer, image_length)
        num_images = _write_rows(kept, out_dir)
        summary = DatasetSummary(
            **{
                name: _summarize(name, splits, kept, checked=tokenizer is not None)
                for name in _FILES
                if name not in _PAIRS or len(getattr(splits, name))
            },
            num_overlapping=num_overlapping,
            vocab_size=None if trained is None else len(trained),
            num_decontaminated=leaks.num_leaked if leaks else None,
            num_images=num_images or None,
        )
    if leaks:
        _write_text(out_dir / DECONTAMINATION_FILE, leaks.to_json())
    _write_text(out_dir / SUMMARY_FILE, summary.to_json())
    return summary


def _refuse_images(splits: Splits, model: ModelConfig | None) -> None:
    for name in ("rl", "evaluation"):
        first = next(getattr(splits, name).images(), None)
        if first is not None and model and model.init == "random":
            raise ConfigError(
                "model.init",
                f"got random; rows of data.{name} show images, which a model made from scratch "
                "does not see; need a pretrained one; set model.path",
            )


def _trained_tokenizer(
    splits: Splits, model: ModelConfig | None, out_dir: Path
) -> DirectoryTokenizer | None:
    if model is None or model.init != "random":
        return None
    directory = train_tokenizer(
        model.tokenizer,
        splits.texts(),
        out_dir / TOKENIZER_DIR,
        max_length=model.max_length,
        chat_template=model.chat_template,
    )
    return DirectoryTokenizer.load(directory)


def _write_rows(splits: Splits, out_dir: Path) -> int:
    for name, file in _FILES.items():
        rows = getattr(splits, name)
        if name not in _PAIRS or len(rows):
            write_batches(out_dir / file, rows.format, rows.batches(), rows.is_plain)
    digests = chain(splits.rl.images(), splits.evaluation.images())
    return write_images(out_dir / IMAGES_FILE, image_folder(splits.rl.path), digests)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def _summarize(name: str, splits: Splits, kept: Splits, checked: bool) -> SplitSummary:
    rows, num_before = getattr(kept, name), len(getattr(splits, name))
    return SplitSummary(
        num_rows=len(rows),
        num_overlong=num_before - len(rows) if checked else None,
        num_distinct_prompts=rows.num_distinct_prompts(),
        data_sources=rows.num_by_source(),
        sources=splits.reports[name],
    )
