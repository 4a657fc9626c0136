"""The commits of what a recipe names on the hub.

Promises: one repository and revision is one commit in all of the answer, so that tokenizer and
weights, and the splits of one data set, cannot be of two.
"""

from typing import TypeVar

from engines.checkpoint.models.teacher import TEACHER_SECTION
from engines.config.base import local_path
from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.look import Look
from engines.config.model import ModelConfig, NamedModelConfig
from infra.identity.hub import RepoType, hub_commit

OnHub = TypeVar("OnHub", bound=ModelConfig | NamedModelConfig | SourceConfig)

_MODELS = {
    "model": "model",
    "against": "against",
    "reward_model": "rl.reward.model",
    "judge": "rl.reward.judge",
    "teacher": TEACHER_SECTION,
}
"""Field of a `Look` -> where a recipe has that model, for error lines."""


def with_commits(at: Look) -> Look:
    """Resolve what is on the hub.

    Args:
        at: what the recipe names; what is not here is on the hub.

    Returns:
        The same, where every `revision` of a hub id is a commit.

    Raises:
        ConfigError: one cannot be resolved; names the field.
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
    """Asks for each repository and revision once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, RepoType, str | None], str] = {}

    def resolved(self, config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        """With a commit for its revision, unless it is here."""
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in self._known:
            self._known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": self._known[key]})

    def of_data(self, data: DataConfig, section: str) -> DataConfig:
        """With commits for all of its sources."""
        sources = {
            split: tuple(
                self.resolved(source, "dataset", f"{section}.{split}.{place}")
                for place, source in enumerate(getattr(data, split))
            )
            for split in SOURCE_SPLITS
        }
        return data.model_copy(update=sources)
