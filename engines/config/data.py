"""The section `data`: sources of rows, their splits, and the order in which rows are visited.

Row schema after preprocessing (parquet): `data_source`, `prompt` (messages), `ability`,
`reward_model.style`, `reward_model.ground_truth`, `extra_info`; supervised rows: `messages`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engines.config.base import PathConfig, Refusals, StrictModel

SEPARATED_SUFFIXES = (".csv", ".tsv")
DATA_SUFFIXES = (".parquet", ".json", ".jsonl", *SEPARATED_SUFFIXES)
"""Suffixes of source files; each file may be gzip-compressed."""
PACKED_SUFFIX = ".gz"
AUTO = "auto"
"""Format of a source whose layout is found from its columns."""
Operation = Literal["add", "subtract", "multiply", "modulo", "compare", "chain"]


SOURCE_SPLITS = ("sft", "rl", "evaluation", "preference", "preference_evaluation")
"""Fields of `DataConfig` that list sources."""


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a file without compression (`.jsonl` of `train.JSONL.gz`)."""
    return Path(path.name.lower().removesuffix(PACKED_SUFFIX)).suffix


class ArithmeticConfig(StrictModel):
    """Generated arithmetic problems with rule-checked answers.

    A hash of its text assigns every problem to one split, so the splits cannot overlap.
    """

    operations: tuple[Operation, ...] = ("add",)
    num_digits: int = Field(default=2, ge=1, le=6)
    """Digits of the larger operands; this sets the difficulty."""
    zero_pad: bool = True
    """Write every operand and answer with the same number of digits."""
    reverse_answer: bool = True
    """Write the least significant digit first, so that carries are known when needed."""
    num_sft: int = Field(default=4096, ge=0)
    num_rl: int = Field(default=4096, ge=0)
    num_eval: int = Field(default=512, ge=1)
    num_preference: int = Field(default=0, ge=0)
    """Pairs of a correct and a wrong answer, for the first prompts of the RL split."""
    num_preference_eval: int = Field(default=0, ge=0)
    """Held-out pairs, from the problems of the evaluation split."""


class SourceConfig(PathConfig):
    """One file, directory or hub data set, and the layout of its rows."""

    format: str = AUTO
    """`auto` finds the one layout that fits the columns of the first rows. `rows` is the row
    schema; `messages`, `sharegpt` (`conversations`), `alpaca` (`instruction`, `output`) are
    supervised rows; `pairs` preference rows; `columns` a question and an answer column. Known data
    sets: `gsm8k`, `math`, `openr1_math`, `dapo_math_17k`, `geometry3k`, `xlam`, `hh_rlhf`,
    `ultrafeedback`."""
    path: str
    """A .parquet, .json, .jsonl, .csv or .tsv file (also .gz), a directory of such files, or a hub
    id. In a directory, .csv and .tsv files are read only if the split has no others; files of other
    forms in the split are refused."""
    split: str = "train"
    """Split to read, found by a word in file or folder names (`Train`, `train2016`, `trainset`,
    `training`); ignored for a single file. If only names with the word inside another (`mytrain`)
    exist, they are refused: set that word."""
    subset: str | None = None
    """Folder inside a directory or hub data set (`main` of GSM8K); null reads all of it."""
    revision: str | None = None
    """Commit, branch or tag of a hub data set, resolved by the plan; null: its default branch."""
    limit: int | None = Field(default=None, ge=1)
    """Take the first `limit` rows after the seeded shuffle; null takes all."""
    options: dict[str, Any] = {}
    """Options of the preprocessor, validated by it."""


class DecontaminationConfig(StrictModel):
    """Find training rows (`sft`, `rl`, `preference`) that share words with held-out prompts."""

    num_words: int = Field(default=13, ge=1)
    """Consecutive words that a training row and a held-out prompt share, as in GPT-3
    (arXiv:2005.14165, appendix C)."""
    min_words: int = Field(default=8, ge=1)
    """A held-out prompt shorter than `num_words` is searched in training rows if it has at least
    this many words; a still shorter one only matches an equal prompt."""
    action: Literal["remove", "refuse"] = "remove"
    """`remove` drops and counts such training rows; `refuse` is an error that names the first."""


class DataConfig(StrictModel):
    """The data of a pipeline: either generated, or read from sources."""

    arithmetic: ArithmeticConfig | None = None
    """Generate the data; excludes the sources below. null: read the sources."""
    sft: tuple[SourceConfig, ...] = ()
    rl: tuple[SourceConfig, ...] = ()
    evaluation: tuple[SourceConfig, ...] = ()
    preference: tuple[SourceConfig, ...] = ()
    """Pairs of answers to one prompt, with the preferred one marked."""
    preference_evaluation: tuple[SourceConfig, ...] = ()
    """Held-out pairs."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Limit in tokens, including chat template and the tokens that the model's processor makes of
    images. Without `tokenizer.json` the data stage counts nothing, and the stage that reads the
    prompts refuses those that do not fit."""
    on_overlong: Literal["error", "drop"] = "error"
    """What to do with prompts longer than `max_prompt_length`; dropped ones are counted."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with rows that break the schema; dropped ones are counted."""
    allow_overlap: bool = False
    """Permit evaluation prompts that also occur in the training splits."""
    decontamination: DecontaminationConfig | None = None
    """Search the training splits for words of held-out prompts, before `allow_overlap` applies to
    equal prompts; null: only equal prompts are found."""

    def _refusals(self) -> Refusals:
        sources = any(getattr(self, split) for split in SOURCE_SPLITS)
        yield (
            self.arithmetic and sources,
            "arithmetic and sources were both given; remove one of the two",
        )
        yield (
            not self.arithmetic and not sources,
            "no data; set arithmetic, or the sources that the stages read, such as sft or rl",
        )
        held_out = self.arithmetic or self.evaluation or self.preference_evaluation
        yield (
            self.decontamination and not held_out,
            "decontamination: got a section and no held-out rows; need evaluation or "
            "preference_evaluation; add one, or remove decontamination",
        )


class BandConfig(StrictModel):
    """Rows that become available together."""

    max_difficulty: float | None = None
    """Largest difficulty in the band, above that of the previous band; null (last band): any."""
    first_step: int = Field(default=0, ge=0)
    """Step of the stage's order at which the band opens; 0 for the first band, then increasing."""


class OrderConfig(StrictModel):
    """The order in which training visits its rows."""

    kind: Literal["shuffled", "ascending", "banded"] = "shuffled"
    """`ascending`: easiest to hardest row in every pass; `banded`: the open `bands`, shuffled."""
    difficulty: str | None = None
    """Key of a number in `extra_info` of RL rows; null: tokens of the prompt or conversation."""
    bands: tuple[BandConfig, ...] = ()
    """Bands of `banded`, from easy to hard."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Share of each `data_source` in what `shuffled` visits; a small source with a large weight
    repeats. Empty: by size."""
