"""Find the files of a data source: a file, a directory, or a data set of the Hugging Face hub.

Promises: files are ordered by their relative names. If file or folder names contain splits, only
the requested split is read, to keep test rows out of training; unclear names are an error. Tables
of text (.csv, .tsv) often repeat typed files beside them, so they are read only if a split has no
others. In a local directory, files with rows in an unsupported form are an error.
Does not promise: an error for unsupported files of a hub data set, since only supported ones are
fetched. A hub data set that cannot be reached is an error.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
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
"""How to convert common unsupported files, by suffix."""
_NO_ROWS = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset-metadata.json",
    "datapackage.json",
)
"""Metadata files beside rows: of `datasets`, of Kaggle, of the Data Package standard."""
_PACKED = (PACKED_SUFFIX, ".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip")
_ROWS_OF_OTHERS = (
    *(".ndjson", ".jsonlines", ".pq", ".parq", ".arrow", ".feather"),
    *(".orc", ".avro", ".xls", ".xlsx"),
)
"""Suffixes of unsupported files with rows."""
_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "evaluation", "eval")
_MAY_NAME_SPLIT = re.compile("train|test|valid|eval")
_OTHER_WORDS = re.compile("contest|latest|retrieval|medieval|constraint")
"""Words that contain the name of a split."""
_HUMP = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LETTER = r"[^\W\d_]"


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source; `revision` is the commit of a hub data set, None for local files.

    `passed_over` names other files that may hold rows: tables of text beside typed files of the
    same split, and files whose names contain no split.
    """

    files: tuple[Path, ...]
    revision: str | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """End of an error about columns that names the `passed_over` files; empty without any."""
        shown = some_of(self.passed_over)
        return f"; not read beside it: {shown} (to read one, name it as the path)" if shown else ""


def resolve_source(source: SourceConfig, field: str, default_subset: str | None) -> SourceFiles:
    """Find the files of a source; downloads the recorded commit of a hub data set.

    Args:
        default_subset: folder to read if the source names none and the folder exists.

    Raises:
        ConfigError: there are no files, none of the split, unclear splits, or unreadable files.
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
        return _files_of_split(path, source, field, default_subset, is_hub=False)
    if source.revision is None:
        names = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        similar = difflib.get_close_matches(path.name, names, n=3)
        shown = f"; {len(similar)} similar: {', '.join(similar)}" if similar else ""
        raise ConfigError(f"{field}.path", f"{path} does not exist (cwd is {Path.cwd()}{shown})")
    suffixes = (f"{suffix}{packed}" for suffix in DATA_SUFFIXES for packed in ("", PACKED_SUFFIX))
    # The hub's patterns are case-sensitive.
    patterns = ["*" + "".join(f"[{c}{c.upper()}]" for c in suffix) for suffix in suffixes]
    root = hub_snapshot(source.path, "dataset", source.revision, field, patterns)
    return replace(
        _files_of_split(root, source, field, default_subset, is_hub=True), revision=root.name
    )


def _files_of_split(
    root: Path, source: SourceConfig, field: str, default_subset: str | None, *, is_hub: bool
) -> SourceFiles:
    subset = source.subset
    if subset is None and default_subset and (root / default_subset).is_dir():
        subset = default_subset
    top = root / subset if subset else root
    names = _named(top, root, is_hub=is_hub)
    if not names:
        raise ConfigError(
            f"{field}.{'subset' if source.subset else 'path'}",
            f"no {', '.join(DATA_SUFFIXES)} file under {top}",
        )
    chosen = _of_split(names, source.split, f"{field}.split", top)
    suffixes = {name: unpacked_suffix(Path(name)) for name in chosen}
    unreadable = [name for name in chosen if suffixes[name] not in DATA_SUFFIXES]
    if unreadable:  # the split would be incomplete
        others = [name for name in chosen if name not in unreadable]
        beside = f", which lies beside {some_of(others)}" if others else ""
        raise ConfigError(
            f"{field}.path",
            f"cannot read {some_of(unreadable)}{beside}; need {', '.join(DATA_SUFFIXES)}, perhaps "
            f"{PACKED_SUFFIX}; unpack, convert or remove it, or give one file as the path",
        )
    tables = [name for name in chosen if suffixes[name] in SEPARATED_SUFFIXES]
    typed = [name for name in chosen if name not in tables]
    of_none = () if len(chosen) == len(names) else _of_no_split(names, source.split)
    return SourceFiles(
        tuple(root / name for name in typed or tables),
        passed_over=tuple(sorted([*(tables if typed else ()), *of_none])),
    )


def _of_split(names: list[str], split: str, field: str, top: Path) -> list[str]:
    if len(_of_no_split(names, split)) < len(names):
        if chosen := [name for name in names if _names_split(name, split)]:
            return chosen
        raise ConfigError(
            field, f"got {split!r}; no file under {top} is named after it; files: {some_of(names)}"
        )
    unclear = [name for name in names if _MAY_NAME_SPLIT.search(_OTHER_WORDS.sub("", name.lower()))]
    if unclear:
        raise ConfigError(
            field,
            f"got {split!r}; the names of {some_of(unclear)} under {top} do not tell if they are "
            "of this split; set it to a whole word of the names to read, without the suffix, or "
            "give one file as the path",
        )
    return names


def _of_no_split(names: Iterable[str], split: str) -> list[str]:
    words = (*_SPLIT_WORDS, split)
    return [name for name in names if not any(_names_split(name, word) for word in words)]


def _named(top: Path, root: Path, *, is_hub: bool) -> list[str]:
    """Return the sorted names, relative to `root`, of files below `top` that may hold rows.

    A packed file is skipped beside the same file unpacked. Unsupported files in the hub's cache are
    ignored, since another download may have left them there.
    """
    suffixes = DATA_SUFFIXES if is_hub else (*DATA_SUFFIXES, *_ROWS_OF_OTHERS)
    return sorted(
        path.relative_to(root).as_posix()
        for path in top.rglob("*.*")
        if path.is_file()
        and (
            unpacked_suffix(path) in suffixes
            or (not is_hub and _is_packed(path) and Path(path.stem.lower()).suffix in suffixes)
        )
        and not (_is_packed(path) and path.with_suffix("").exists())
        and path.name not in _NO_ROWS
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() in _PACKED


def _names_split(name: str, split: str) -> bool:
    """True if the relative name has the split as a word (`train` in `data/train_prefs-0.parquet`).

    Words end at non-letters, or where a capital follows a small letter. `set` or `ing` may follow.
    """
    before = "[^\\W_]" if split[:1].isdigit() else _LETTER
    after = "[^\\W_]" if split[-1:].isdigit() else _LETTER
    word = rf"(?<!{before}){re.escape(split.lower())}(?:[-_ ]?(?:set|ing))?(?!{after})"
    return any(re.search(word, each.lower()) for each in (name, _HUMP.sub("_", name)))


def some_of(names: Sequence[str]) -> str:
    """Return the first five names and the number of the others, for errors."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
