"""Sources of rows and how they are split.

The row schema after preprocessing (parquet): `data_source`, `prompt` (messages), `ability`,
`reward_model.style`, `reward_model.ground_truth`, `extra_info`; supervised rows: `messages`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.base import StrictModel, local_path

SEPARATED_SUFFIXES = (".csv", ".tsv")
DATA_SUFFIXES = (".parquet", ".json", ".jsonl", *SEPARATED_SUFFIXES)
"""Files that a source may consist of; each may be packed."""
PACKED_SUFFIX = ".gz"
AUTO = "auto"
"""The format of a source whose layout its columns tell."""
Operation = Literal["add", "subtract", "multiply", "modulo", "compare", "chain"]


SOURCE_SPLITS = ("sft", "rl", "evaluation", "preference", "preference_evaluation")
"""Fields of `DataConfig` that list sources."""


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a file without compression (`.jsonl` of `train.JSONL.gz`)."""
    return Path(path.name.lower().removesuffix(PACKED_SUFFIX)).suffix


class ArithmeticConfig(StrictModel):
    """Generated arithmetic problems whose answers are checked by rule.

    Every problem belongs to one split by a hash of its text, so the splits cannot overlap.
    """

    operations: tuple[Operation, ...] = ("add",)
    num_digits: int = Field(default=2, ge=1, le=6)
    """Digits of the larger operands: the level of difficulty."""
    zero_pad: bool = True
    """Write every operand and answer with the same number of digits."""
    reverse_answer: bool = True
    """Least significant digit first, so that carries are known when a digit is written."""
    num_sft: int = Field(default=4096, ge=0)
    num_rl: int = Field(default=4096, ge=0)
    num_eval: int = Field(default=512, ge=1)
    num_preference: int = Field(default=0, ge=0)
    """Pairs of a right and a wrong answer, to the first prompts of the RL split."""
    num_preference_eval: int = Field(default=0, ge=0)
    """Pairs that are held out, of the evaluation split's problems."""


class SourceConfig(StrictModel):
    """One file, directory or hub data set, and the layout its rows have."""

    format: str = AUTO
    """`auto` (the one layout that the columns of the first rows have); `rows` (the row schema);
    supervised rows as `messages`, `sharegpt` (`conversations`) or `alpaca` (`instruction`,
    `output`); `pairs` (preference rows); `columns` (a question and an answer column); or a
    preprocessor of a known data set: `gsm8k`, `math`, `openr1_math`, `dapo_math_17k`,
    `geometry3k`, `xlam`, `hh_rlhf`, `ultrafeedback`."""
    path: str
    """A .parquet, .json, .jsonl, .csv or .tsv file, perhaps packed (.gz), a directory of such
    files, or a hub id. The .csv and .tsv files of a directory are read where its split has none of
    the others. Files in another form among those of the split are refused."""
    split: str = "train"
    """Split to read where file or folder names tell splits apart, by a word of theirs (`Train`,
    `train2016`, `trainset`, `training`); ignored for a single file. Names that hold such a word
    within another (`mytrain`) are refused where no other tells splits apart: set that word."""
    subset: str | None = None
    """Folder inside a directory or hub data set (`main` of GSM8K); null reads all of it."""
    revision: str | None = None
    """Commit, branch or tag of a hub data set; null is its default branch. The plan resolves it."""
    limit: int | None = Field(default=None, ge=1)
    """Take the first `limit` rows after the seeded shuffle; null takes all."""
    options: dict[str, Any] = {}
    """Options of the preprocessor, validated by the preprocessor itself."""

    def identity_values(self) -> dict[str, Any]:
        """A hub id counts, with its commit; a local path does not."""
        values = super().identity_values()
        return {**values, "path": None} if local_path(self.path) else values


class DecontaminationConfig(StrictModel):
    """Training rows that share words with held-out prompts, in `sft`, `rl` and `preference`."""

    num_words: int = Field(default=13, ge=1)
    """Words in a row that a training row and a held-out one share; those of GPT-3
    (arXiv:2005.14165, appendix C)."""
    min_words: int = Field(default=8, ge=1)
    """A held-out prompt of fewer than `num_words` words is looked for inside training rows if it
    has so many; a shorter one only counts where a prompt equals it."""
    action: Literal["remove", "refuse"] = "remove"
    """Leave such training rows out and count them, or stop with the first."""


class DataConfig(StrictModel):
    """The data of a pipeline: either generated, or read from sources."""

    arithmetic: ArithmeticConfig | None = None
    """Generate the data; excludes the sources below."""
    sft: tuple[SourceConfig, ...] = ()
    rl: tuple[SourceConfig, ...] = ()
    evaluation: tuple[SourceConfig, ...] = ()
    preference: tuple[SourceConfig, ...] = ()
    """Pairs of answers to one prompt, of which people chose one."""
    preference_evaluation: tuple[SourceConfig, ...] = ()
    """Pairs that are held out."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens of a prompt, chat template and images included. An image counts as the image processor
    beside the weights says for its size. For a model without `tokenizer.json` nothing is counted
    when data are made; the stage that reads the prompts refuses those that do not fit."""
    on_overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts longer than `max_prompt_length`; dropped ones are counted."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Treatment of rows that break the schema; dropped ones are counted."""
    allow_overlap: bool = False
    """Permit evaluation prompts that also occur in the training splits."""
    decontamination: DecontaminationConfig | None = None
    """Look for held-out prompts in the training splits by their words, before `allow_overlap`
    judges equal ones; null: equal prompts alone are looked for."""

    @model_validator(mode="after")
    def _check_origin(self) -> "DataConfig":
        sources = any(getattr(self, split) for split in SOURCE_SPLITS)
        if self.arithmetic and sources:
            raise ValueError("arithmetic and sources were both given; remove one of the two")
        if not self.arithmetic and not sources:
            raise ValueError("no data; set arithmetic, or the sources sft, rl and evaluation")
        held_out = self.arithmetic or self.evaluation or self.preference_evaluation
        if self.decontamination and not held_out:
            raise ValueError(
                "decontamination: got a section and no held-out rows; need evaluation or "
                "preference_evaluation; add one, or remove decontamination"
            )
        return self


class BandConfig(StrictModel):
    """Rows that are let in together."""

    max_difficulty: float | None = None
    """Of its rows; the band before has the easier ones. null, of the last band: all the rest."""
    first_step: int = Field(default=0, ge=0)
    """Steps of the stage's order before the band is open; 0 for the first, then rising."""


class OrderConfig(StrictModel):
    """The order in which training visits its rows."""

    kind: Literal["shuffled", "ascending", "banded"] = "shuffled"
    """`ascending`: every pass from the easiest row to the most difficult; `banded`: the rows of
    all `bands` that are open, shuffled."""
    difficulty: str | None = None
    """Key of `extra_info` that holds a number, in RL rows; null: tokens of the prompt or
    conversation."""
    bands: tuple[BandConfig, ...] = ()
    """Bands of `banded`, from easy to difficult."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Share of each `data_source` in what `shuffled` visits; a small source with a large weight
    repeats. Empty: by size."""
