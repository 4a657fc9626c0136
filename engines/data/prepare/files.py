"""Which files a data source means: a file, a directory, or a data set of the hub.

Promises: files in the order of their relative names; in a directory that separates splits by
file or folder name only the split asked for is read, so test rows never slip into training. Tables
of text (.csv, .tsv) often repeat the files with types beside them: of a split they are read where
it has no others, and else named in errors.
Does not promise: a network; a hub id that cannot be reached is an error that says so.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.config.data import (
    DATA_SUFFIXES,
    PACKED_SUFFIX,
    SEPARATED_SUFFIXES,
    SourceConfig,
    unpacked_suffix,
)
from infra.errors import ConfigError
from infra.identity.hub import hub_snapshot

_CONVERSIONS = {".txt": "; write one JSON object a line, as .jsonl"}
"""What to do with files that people bring, by suffix."""
_NO_ROWS = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset-metadata.json",
    "datapackage.json",
)
"""What lies beside rows: of the library `datasets`, of Kaggle, of the Data Package standard."""
_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source.

    Attributes:
        files: at least one.
        revision: commit of a hub data set, None for local files.
        passed_over: tables of text of the same split, which are not read for these files' sake.
    """

    files: tuple[Path, ...]
    revision: str | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What an error about the files' columns says of the tables that were passed over."""
        if not self.passed_over:
            return ""
        return f"; not read beside it: {_some(self.passed_over)} (to read one, name it as the path)"


def resolve_source(source: SourceConfig, field: str, default_subset: str | None) -> SourceFiles:
    """Find the files of a source, downloading the planned commit of a hub data set.

    Args:
        source: path, split, subset and revision.
        field: the source's place in the configuration, for errors (`data.rl.0`).
        default_subset: folder to read when the source names none and the folder exists.

    Returns:
        At least one file.

    Raises:
        ConfigError: nothing is there, or nothing of the split.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        if unpacked_suffix(path) not in DATA_SUFFIXES:
            raise ConfigError(
                f"{field}.path",
                f"got {source.path!r}; need a {', '.join(DATA_SUFFIXES)} file"
                f"{_CONVERSIONS.get(path.suffix, '')}",
            )
        return SourceFiles((path,))
    if path.is_dir():
        return _files_of_split(path, source, field, default_subset)
    if source.revision is None:
        raise ConfigError(f"{field}.path", _absent(path))
    patterns = [f"*{suffix}{packed}" for suffix in DATA_SUFFIXES for packed in ("", PACKED_SUFFIX)]
    root = hub_snapshot(source.path, "dataset", source.revision, field, patterns)
    return replace(_files_of_split(root, source, field, default_subset), revision=root.name)


def _files_of_split(
    root: Path, source: SourceConfig, field: str, default_subset: str | None
) -> SourceFiles:
    subset = source.subset
    if subset is None and default_subset and (root / default_subset).is_dir():
        subset = default_subset
    top = root / subset if subset else root
    files = _named(top, root)
    if not files:
        raise ConfigError(
            f"{field}.{'subset' if source.subset else 'path'}",
            f"no {', '.join(DATA_SUFFIXES)} file under {top}",
        )
    if any(_names_split(name, word) for name in files for word in (*_SPLIT_WORDS, source.split)):
        chosen = [name for name in files if _names_split(name, source.split)]
        if not chosen:
            raise ConfigError(
                f"{field}.split",
                f"got {source.split!r}; no file under {top} is named after it; files: "
                f"{_some(files)}",
            )
        files = chosen
    tables = [name for name in files if unpacked_suffix(Path(name)) in SEPARATED_SUFFIXES]
    typed = [name for name in files if name not in tables]
    passed_over = tuple(tables) if typed else ()
    return SourceFiles(tuple(root / name for name in typed or tables), passed_over=passed_over)


def _named(top: Path, root: Path) -> list[str]:
    """Names, relative to `root`, of the files below `top` that may hold rows, sorted.

    Of a file that lies there both packed and unpacked, one.
    """
    return sorted(
        path.relative_to(root).as_posix()
        for path in top.rglob("*.*")
        if path.is_file()
        and unpacked_suffix(path) in DATA_SUFFIXES
        and not (path.suffix == PACKED_SUFFIX and path.with_suffix("").exists())
        and path.name not in _NO_ROWS
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _names_split(name: str, split: str) -> bool:
    """Whether words of the file's relative name are the split (`data/train_prefs-0.parquet`)."""
    return re.search(rf"(?:^|[/_.\-]){re.escape(split)}(?:$|[/_.\-])", name) is not None


def _absent(path: Path) -> str:
    text = f"{path} does not exist (cwd is {Path.cwd()}"
    parent = path.parent
    names = sorted(p.name for p in parent.iterdir()) if parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, names, n=3)
    if similar:
        text += f"; {len(similar)} similar: {', '.join(similar)}"
    return f"{text})"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
