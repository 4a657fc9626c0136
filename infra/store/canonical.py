"""One JSON text per value, so that equal values have equal digests on every machine.

Keys are sorted; the text is ASCII without white space. Sets, non-string keys, NaN, infinities and
unknown objects are refused, since their text depends on Python, a library or insertion order. 1 and
1.0 differ.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel


def canonical_json(obj: Any) -> bytes:
    """Return the canonical JSON of a value as ASCII bytes without a line end.

    Raises:
        TypeError, ValueError: a part has no canonical form; the text names its position.
    """
    plain = _plain(obj, "$")
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def sha256_json(obj: Any) -> str:
    """Return the sha256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, 64 hex digits; reads in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(obj: Any, where: str) -> Any:
    match obj:
        case BaseModel():
            return _plain(obj.model_dump(mode="json"), where)
        case None | bool() | int() | str():
            return obj
        case float():
            if not math.isfinite(obj):
                raise ValueError(f"{where}: {obj} has no JSON form")
            return obj
        case Mapping():
            for key in obj:
                if not isinstance(key, str):
                    raise TypeError(f"{where}: key {key!r} is not a string")
            return {key: _plain(value, f"{where}.{key}") for key, value in obj.items()}
        case list() | tuple():
            return [_plain(value, f"{where}[{i}]") for i, value in enumerate(obj)]
    raise TypeError(f"{where}: {type(obj).__name__} has no canonical JSON form")
