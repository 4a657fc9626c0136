"""safetensors files whose disk errors are `OSError`.

The library raises an exception of its own for a full or failing disk, with the errno in its text
alone, and calls every file absent that it cannot open: nothing that tells a failing disk from a
damaged or an absent file would see it.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

_ERRNO = re.compile(r"\(os error (\d+)\)|^unable to .*\((\d+)\)")
"""As safetensors and torch write it."""


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file.

    Args:
        tensors: by name, contiguous.
        path: of the file; it is replaced.
        metadata: for its header.

    Raises:
        OSError: the disk is full or fails.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        raise disk_error(error, path) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Args:
        path: of the file.

    Returns:
        The tensors by name.

    Raises:
        SafetensorError: it is no such file.
        OSError: it could not be read.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise disk_error(error, path) from error


def disk_error(error: BaseException, path: Path) -> BaseException:
    """The `OSError` with an errno that a reader's or writer's error tells of; or the error."""
    known = isinstance(error, SafetensorError | OSError | RuntimeError)
    if not known or getattr(error, "errno", None):
        return error
    if told := _ERRNO.search(str(error)):
        number = int(told[1] or told[2])
        return OSError(number, os.strerror(number), str(path))
    # The library says "No such file" of every file that it cannot open.
    named = Path(str(error).rpartition(": ")[2])
    if isinstance(error, FileNotFoundError) and named.exists():
        return OSError(errno.EIO, "cannot be opened", str(named))
    return error


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model directory, one at a time, by their names in the files."""
    for shard in sorted(model_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
