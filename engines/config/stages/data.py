"""The stage that makes a dataset."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from engines.config.base import NotIdentity, local_path
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig
from engines.config.model import ModelConfig
from engines.config.plugins import (
    PluginKind,
    recognised_layouts,
)
from engines.config.stages.base import StageConfig
from engines.config.stages.inputs import ExternalInput, model_input

HELD_OUT = "held_out."
"""In front of a suite's name: the input that is its dataset."""
SOURCE = "data."
"""In front of a split and a number: the input that is a local source."""


class PreprocessStageConfig(StageConfig):
    """Raw data to rows, and the tokenizer of a model made from scratch."""

    stage = "preprocess"
    of: Annotated[str, NotIdentity] = ""
    """The suite whose rows they are; empty for the recipe's own."""
    data: DataConfig
    model: ModelConfig | None = None
    """Whose tokens limit the rows' lengths; null: whoever reads the rows looks at their lengths."""

    @property
    def label(self) -> str:
        """With the suite."""
        return f"{self.stage}_{self.of}" if self.of else self.stage

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The preprocessors of the sources; each that `auto` may find."""
        for split in SOURCE_SPLITS:
            for source in getattr(self.data, split):
                names = recognised_layouts() if source.format == AUTO else [source.format]
                for name in names:
                    yield "preprocessor", name

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Every local source, and the model, for its tokenizer."""
        del given
        section = f"suites.{self.of}.data" if self.of else "data"
        sources = {
            f"{SOURCE}{split}.{index}": ExternalInput(path, f"{section}.{split}.{index}.path")
            for split in SOURCE_SPLITS
            for index, source in enumerate(getattr(self.data, split))
            if (path := local_path(source.path))
        }
        return {**sources, **(model_input(self.model) if self.model else {})}
