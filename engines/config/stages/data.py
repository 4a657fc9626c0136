"""The stage that makes a dataset."""

from collections.abc import Collection, Iterator, Mapping

from engines.config.base import local_path
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig
from engines.config.model import ModelConfig
from engines.config.plugins import (
    PluginKind,
    recognised_layouts,
)
from engines.config.stages.base import StageConfig
from engines.config.stages.inputs import ExternalInput, model_input


class PreprocessStageConfig(StageConfig):
    """Raw data to rows, and the tokenizer of a model made from scratch."""

    stage = "preprocess"
    data: DataConfig
    model: ModelConfig

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
        sources = {
            f"data.{split}.{index}": ExternalInput(path, f"data.{split}.{index}.path")
            for split in SOURCE_SPLITS
            for index, source in enumerate(getattr(self.data, split))
            if (path := local_path(source.path))
        }
        return {**sources, **model_input(self.model)}
