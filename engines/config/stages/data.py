"""Configuration of the stage that makes a dataset."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Self

from engines.config.base import NotIdentity, local_path
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig
from engines.config.model import ModelConfig
from engines.config.plugins import (
    PluginKind,
    recognised_layouts,
)
from engines.config.stages.base import ExternalInput, InputT, StageConfig, model_input, needed

if TYPE_CHECKING:
    from engines.config.recipe import Recipe

HELD_OUT = "held_out."
"""Prefix of an input that is the dataset of a suite."""
SOURCE = "data."
"""Prefix of an input that is a local source; split and index follow."""


class PreprocessStageConfig(StageConfig):
    """Turns raw data into rows, and trains the tokenizer of a model made from scratch."""

    stage = "preprocess"
    labelled_by = "of"

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Return the suites' datasets, whose problems are kept out of the training rows."""
        return {name: given[name] for name in given if name.startswith(HELD_OUT)}

    of: Annotated[str, NotIdentity] = ""
    """Suite; empty for the recipe's own data."""
    data: DataConfig
    model: ModelConfig | None = None
    """Model whose tokenizer limits the length of rows; null: their reader checks lengths."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe") -> Self:
        """Configure preprocessing of the recipe's data; raises ValueError if it has none."""
        return cls(data=needed(recipe.data, "data"), model=recipe.model)

    @classmethod
    def of_suite(cls, recipe: "Recipe", name: str) -> Self:
        """Configure preprocessing of the data of a suite, for any model."""
        return cls(of=name, data=recipe.data_suites[name])

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Yield the preprocessors of the sources; for `auto`, all that it may choose."""
        for split in SOURCE_SPLITS:
            for source in getattr(self.data, split):
                for name in recognised_layouts() if source.format == AUTO else [source.format]:
                    yield "preprocessor", name

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return the local sources, and the model for its tokenizer."""
        section = f"suites.{self.of}.data" if self.of else "data"
        sources = {
            f"{SOURCE}{split}.{index}": ExternalInput(path, f"{section}.{split}.{index}.path")
            for split in SOURCE_SPLITS
            for index, source in enumerate(getattr(self.data, split))
            if (path := local_path(source.path))
        }
        return {**sources, **model_input(self.model)}
