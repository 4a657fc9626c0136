"""What lies on the Hugging Face hub, as an input of a stage: a commit, never a branch.

Promises: a name is resolved when a run is planned, and a job fetches the commit that was planned,
wherever the branch points by then. What the hub does not answer, its cache on this machine does.
Does not promise a deadline: whoever asks has one.
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
    """The commit that a revision of a repository names now.

    Args:
        repo_id: `owner/name`.
        repo_type: what it holds.
        revision: a branch, a tag or a commit; None is the default branch.
        section: of the configuration, for errors: its `path` and `revision` are the names.

    Returns:
        40 hex digits.

    Raises:
        ConfigError: there is no such repository or revision, or neither the hub nor its cache
            tells.
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
    """The files of a planned commit, downloaded unless the hub's cache has them.

    Args:
        repo_id: `owner/name`.
        repo_type: what it holds.
        revision: of `hub_commit`.
        section: of the configuration, for errors.
        patterns: of the names of files that are fetched.

    Returns:
        A directory of the cache, whose name is the commit.

    Raises:
        ConfigError: `revision` is no commit, or neither the hub nor its cache gives it.
    """
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"{section}.revision",
            f"got {revision!r}; need the commit of {repo_id} that the plan resolved, for nothing "
            f"of that name is here (cwd is {Path.cwd()})",
        )
    with _refusals(repo_id, revision, section):
        folder = huggingface_hub.snapshot_download(
            repo_id, repo_type=repo_type, revision=revision, allow_patterns=list(patterns)
        )
    return Path(folder)


@contextmanager
def _refusals(repo_id: str, revision: str | None, section: str) -> Iterator[None]:
    """Whatever the hub's client ends with, as one line with its field."""
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
