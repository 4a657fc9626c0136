"""What lies on the Hugging Face hub, as an input of a stage: a commit, never a branch.

Promises: a name is resolved when a run is planned, and a job fetches the commit that was planned,
wherever the branch points by then. What the hub does not answer, its cache on this machine does.
Does not promise: that the hub still has the commit when the job asks for it.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from infra.errors import ConfigError
from infra.store.atomic import atomic_write_bytes

RepoType = Literal["model", "dataset"]

TIMEOUT_S = 30.0
"""Of one question to the hub."""
_COMMIT = re.compile(r"[0-9a-f]{40}")

logger = logging.getLogger(__name__)


def hub_commit(repo_id: str, repo_type: RepoType, revision: str | None, section: str) -> str:
    """The commit that a revision of a repository names now.

    Args:
        repo_id: `owner/name`.
        repo_type: what it holds.
        revision: a branch, a tag or a commit; None is the default branch.
        section: of the configuration, for errors: its fields `path` and `revision` gave the names.

    Returns:
        40 hex digits.

    Raises:
        ConfigError: there is no such repository or revision, or neither the hub nor its cache
            tells.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    # Heavy, and needed by what lies on the hub alone.
    from huggingface_hub import HfApi, constants

    folder = f"{repo_type}s--{repo_id.replace('/', '--')}"
    ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / (revision or constants.DEFAULT_REVISION)
    try:
        info = HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision, timeout=TIMEOUT_S)
    except _no_answers() as error:
        if not ref.is_file():
            raise _not_given(repo_id, revision, section, error) from None
        commit = ref.read_text(encoding="utf-8").strip()
        logger.warning(
            f"{section}.path: the hub did not tell the commit of {repo_id} "
            f"({type(error).__name__}); its cache says {commit}"
        )
        return commit
    # For a time without a network: a job asks for the commit, which leaves no ref behind.
    with contextlib.suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(ref, str(info.sha).encode())
    return str(info.sha)


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
    from huggingface_hub import snapshot_download

    if revision is None or not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"{section}.revision",
            f"got {revision!r}; need the commit of {repo_id} that the plan resolved, for nothing "
            f"of that name is here (cwd is {Path.cwd()})",
        )
    try:
        return Path(
            snapshot_download(
                repo_id,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=list(patterns),
                etag_timeout=TIMEOUT_S,
            )
        )
    except _no_answers() as error:
        raise _not_given(repo_id, revision, section, error) from None


def _no_answers() -> tuple[type[Exception], ...]:
    """What a question to the hub or its cache may end with."""
    from huggingface_hub import errors

    return (
        errors.HTTPError,  # pyright: ignore[reportPrivateImportUsage]  of the HTTP library it uses
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
    )


def _not_given(repo_id: str, revision: str | None, section: str, error: Exception) -> ConfigError:
    from huggingface_hub.errors import RevisionNotFoundError

    field = "revision" if isinstance(error, RevisionNotFoundError) else "path"
    return ConfigError(
        f"{section}.{field}",
        f"{repo_id} is no path here (cwd is {Path.cwd()}), and neither the hub nor its cache gives "
        f"it (revision {revision or 'main'}): {type(error).__name__}; check the name, HF_TOKEN and "
        "the network",
    )
