"""Hugging Face hub repositories as inputs of a stage, pinned to a commit.

Promises: the planner resolves a name to a commit, and the job fetches that commit even if the
branch has moved. If the hub does not answer, the local cache is used.
Does not promise: a deadline; the caller sets one.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import huggingface_hub

from infra.errors import ConfigError

RepoType = Literal["model", "dataset"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_commit(repo_id: str, repo_type: RepoType, revision: str | None, section: str) -> str:
    """Return the commit (40 hex digits) that a revision of the repository `owner/name` names now.

    A `revision` of None is the default branch. Errors name fields of the configuration `section`.

    Raises:
        ConfigError: repository or revision do not exist, or neither hub nor cache answers.
    """
    with _refusals(repo_id, revision, section):
        found = huggingface_hub.HfApi().resolve_revision(
            repo_id, repo_type=repo_type, revision=revision
        )
    return found.resolved


def hub_snapshot(
    repo_id: str,
    repo_type: RepoType,
    revision: str | None,
    section: str,
    patterns: Sequence[str],
) -> Path:
    """Return the cache directory of a `hub_commit`; downloads missing files that match `patterns`.

    Raises:
        ConfigError: `revision` is not a commit, or neither hub nor cache provides it.
    """
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"{section}.revision",
            f"got {revision!r}; need the commit of {repo_id} that the plan resolved, because no "
            f"path of that name exists here (cwd is {Path.cwd()})",
        )
    with _refusals(repo_id, revision, section):
        folder = huggingface_hub.snapshot_download(
            repo_id, repo_type=repo_type, revision=revision, allow_patterns=list(patterns)
        )
    return Path(folder)


@contextmanager
def _refusals(repo_id: str, revision: str | None, section: str) -> Iterator[None]:
    """Raise refusals of the hub's client as a one-line `ConfigError` that names the field."""
    from huggingface_hub import errors  # loads the HTTP library

    try:
        yield
    except (
        errors.HTTPError,  # pyright: ignore[reportPrivateImportUsage]  of that library
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
    ) as error:
        field = "revision" if isinstance(error, errors.RevisionNotFoundError) else "path"
        raise ConfigError(
            f"{section}.{field}",
            f"{repo_id} is no path here (cwd is {Path.cwd()}), and neither the hub nor its cache "
            f"gives it (revision {revision or 'main'}): {type(error).__name__}; check the name, "
            "HF_TOKEN and the network",
        ) from None
