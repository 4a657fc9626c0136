"""Hub ids of a recipe with the commits that they mean.

Promises: one repository and revision is one commit in all of a recipe, so that tokenizer and
weights, and the splits of one data set, cannot be of two.
"""

from typing import TypeVar

from engines.config.base import local_path
from engines.config.data import SourceConfig
from engines.config.model import ModelConfig
from flows.recipe.recipe import Recipe
from infra.identity.hub import RepoType, hub_commit

OnHub = TypeVar("OnHub", ModelConfig, SourceConfig)


def with_hub_commits(recipe: Recipe) -> Recipe:
    """Resolve what a recipe names on the hub; asks the hub only for what is no commit yet.

    Args:
        recipe: its local paths exist.

    Returns:
        The recipe that runs: every `revision` of a hub id is a commit.

    Raises:
        ConfigError: a repository or a revision cannot be resolved; names the field.
    """
    known: dict[tuple[str, RepoType, str | None], str] = {}

    def pinned(config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in known:
            known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": known[key]})

    sources = {
        split: tuple(
            pinned(source, "dataset", f"data.{split}.{index}")
            for index, source in enumerate(getattr(recipe.data, split))
        )
        for split in ("sft", "rl", "evaluation")
    }
    return recipe.model_copy(
        update={
            "model": pinned(recipe.model, "model", "model"),
            "data": recipe.data.model_copy(update=sources),
        }
    )
