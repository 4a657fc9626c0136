"""Which files a data source means: a file, a directory, or a data set of the hub.

Promises: files in the order of their relative names; in a directory that separates splits by
file or folder name only the split asked for is read, so test rows never slip into training; names
that may separate them are an error. Tables of text (.csv, .tsv) often repeat the files with types
beside them: of a split they are read where it has no others. Files that hold rows in a form that
nothing here reads are an error in a local directory; what is left out is named.
Does not promise: a network; a hub id that cannot be reached is an error that says so. Of a hub data
set only files that can be read are fetched, so nobody hears of others.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
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
_PACKED = (PACKED_SUFFIX, ".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip")
_ROWS_OF_OTHERS = (
    *(".ndjson", ".jsonlines", ".pq", ".parq", ".arrow", ".feather"),
    *(".orc", ".avro", ".xls", ".xlsx"),
)
"""Suffixes of rows that nothing here reads."""
_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "evaluation", "eval")
_MAY_NAME_SPLIT = re.compile("train|test|valid|eval")
_OTHER_WORDS = re.compile("contest|latest|retrieval|medieval|constraint")
"""That hold the word of a split."""
_HUMP = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LETTER = r"[^\W\d_]"


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source.

    Attributes:
        files: at least one.
        revision: commit of a hub data set, None for local files.
        passed_over: names of others that may hold rows: tables of text of the same split, which
            are not read for these files' sake, and files that are named after no split at all.
    """

    files: tuple[Path, ...]
    revision: str | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What an error about the files' columns says of the tables that were passed over."""
        if not self.passed_over:
            return ""
        return (
            f"; not read beside it: {some_of(self.passed_over)} (to read one, name it as the path)"
        )


def resolve_source(source: SourceConfig, field: str, default_subset: str | None) -> SourceFiles:
    """Find the files of a source, downloading the planned commit of a hub data set.

    Args:
        source: path, split, subset and revision.
        field: the source's place in the configuration, for errors (`data.rl.0`).
        default_subset: folder to read when the source names none and the folder exists.

    Returns:
        At least one file.

    Raises:
        ConfigError: nothing is there, or nothing of the split, or it is not told apart, or a part
            of it cannot be read.
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
        raise ConfigError(f"{field}.path", _absent(path))
    suffixes = (f"{suffix}{packed}" for suffix in DATA_SUFFIXES for packed in ("", PACKED_SUFFIX))
    # The hub tells capitals apart.
    patterns = ["*" + "".join(f"[{c}{c.upper()}]" for c in suffix) for suffix in suffixes]
    root = hub_snapshot(source.path, "dataset", source.revision, field, patterns)
    found = _files_of_split(root, source, field, default_subset, is_hub=True)
    return replace(found, revision=root.name)


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
    _refuse_unreadable(chosen, suffixes, f"{field}.path")
    tables = [name for name in chosen if suffixes[name] in SEPARATED_SUFFIXES]
    typed = [name for name in chosen if name not in tables]
    of_none = () if len(chosen) == len(names) else _of_no_split(names, source.split)
    return SourceFiles(
        tuple(root / name for name in typed or tables),
        passed_over=tuple(sorted([*(tables if typed else ()), *of_none])),
    )


def _of_split(names: list[str], split: str, field: str, top: Path) -> list[str]:
    """Those of the names that are the split's; all of them where none names a split."""
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
            f"got {split!r}; whether {some_of(unclear)} under {top} are of it their names do not "
            "tell; set it to a word of the names that are to be read, as a whole and without what "
            "follows the last point, or give one file as the path",
        )
    return names


def _of_no_split(names: Iterable[str], split: str) -> list[str]:
    """The names that hold no word of any split."""
    words = (*_SPLIT_WORDS, split)
    return [name for name in names if not any(_names_split(name, word) for word in words)]


def _refuse_unreadable(names: Sequence[str], suffixes: Mapping[str, str], field: str) -> None:
    """Half of a split is not the split."""
    unreadable = [name for name in names if suffixes[name] not in DATA_SUFFIXES]
    if unreadable:
        others = [name for name in names if name not in unreadable]
        beside = f", which lies beside {some_of(others)}" if others else ""
        raise ConfigError(
            field,
            f"cannot read {some_of(unreadable)}{beside}; need {', '.join(DATA_SUFFIXES)}, perhaps "
            f"{PACKED_SUFFIX}; unpack, convert or remove it, or give one file as the path",
        )


def _named(top: Path, root: Path, *, is_hub: bool) -> list[str]:
    """Names, relative to `root`, of the files below `top` that may hold rows, sorted.

    Of a file that lies there both packed and unpacked, one. What else lies in the hub's cache
    depends on who fetched it.
    """
    suffixes = DATA_SUFFIXES if is_hub else (*DATA_SUFFIXES, *_ROWS_OF_OTHERS)
    return sorted(
        path.relative_to(root).as_posix()
        for path in top.rglob("*.*")
        if path.is_file()
        and (unpacked_suffix(path) in suffixes or (not is_hub and _is_packed_otherwise(path)))
        and not (path.suffix.lower() in _PACKED and path.with_suffix("").exists())
        and path.name not in _NO_ROWS
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _is_packed_otherwise(path: Path) -> bool:
    """Whether it is packed in a way that nothing here unpacks, and holds rows."""
    inner = Path(path.stem.lower()).suffix
    return path.suffix.lower() in _PACKED and inner in (*DATA_SUFFIXES, *_ROWS_OF_OTHERS)


def _names_split(name: str, split: str) -> bool:
    """Whether words of the file's relative name are the split (`data/train_prefs-0.parquet`).

    Words end where letters do, or where a capital follows a small letter. `set` or `ing` may
    follow the split.
    """
    before = "[^\\W_]" if split[:1].isdigit() else _LETTER
    after = "[^\\W_]" if split[-1:].isdigit() else _LETTER
    word = rf"(?<!{before}){re.escape(split.lower())}(?:[-_ ]?(?:set|ing))?(?!{after})"
    return any(re.search(word, each.lower()) for each in (name, _HUMP.sub("_", name)))


def _absent(path: Path) -> str:
    text = f"{path} does not exist (cwd is {Path.cwd()}"
    parent = path.parent
    names = sorted(p.name for p in parent.iterdir()) if parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, names, n=3)
    if similar:
        text += f"; {len(similar)} similar: {', '.join(similar)}"
    return f"{text})"


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are, for people."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
