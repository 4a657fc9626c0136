"""Resolves the hub revisions that a recipe names to commits.

Promises: each repository and revision has one commit in the whole answer, so tokenizer and weights,
or the splits of one data set, cannot come from different commits.
"""

from typing import TypeVar

from engines.checkpoint.models.teacher import TEACHER_SECTION
from engines.config.base import local_path
from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.model import ModelConfig, NamedModelConfig
from engines.config.preflight_request import PreflightRequest
from infra.identity.hub import RepoType, hub_commit

OnHub = TypeVar("OnHub", bound=ModelConfig | NamedModelConfig | SourceConfig)

_MODELS = {
    "model": "model",
    "against": "against",
    "reward_model": "rl.reward.model",
    "judge": "rl.reward.judge",
    "teacher": TEACHER_SECTION,
}
"""Section of a recipe for each model field of a `PreflightRequest`, for errors."""


def with_commits(at: PreflightRequest) -> PreflightRequest:
    """Return the request with a commit as the `revision` of every hub id.

    A ConfigError names the field that cannot be resolved.
    """
    hub = _Hub()
    found: dict[str, object] = {"data": hub.of_data(at.data, "data") if at.data else None}
    for name, section in _MODELS.items():
        model: ModelConfig | NamedModelConfig | None = getattr(at, name)
        found[name] = model and hub.resolved(model, "model", section)
    found["suites"] = {
        name: suite.model_copy(
            update={"data": suite.data and hub.of_data(suite.data, f"suites.{name}.data")}
        )
        for name, suite in at.suites.items()
    }
    return at.model_copy(update=found)


class _Hub:
    """Resolves each repository and revision once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, RepoType, str | None], str] = {}

    def resolved(self, config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        """Return the configuration with a commit as revision; a local path stays as it is."""
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in self._known:
            self._known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": self._known[key]})

    def of_data(self, data: DataConfig, section: str) -> DataConfig:
        """Return the data configuration with commits for all sources."""
        sources = {
            split: tuple(
                self.resolved(source, "dataset", f"{section}.{split}.{place}")
                for place, source in enumerate(getattr(data, split))
            )
            for split in SOURCE_SPLITS
        }
        return data.model_copy(update=sources)
