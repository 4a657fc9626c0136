"""Read and write safetensors files; disk errors are `OSError`.

The library raises its own exception for a full or failing disk, with the errno only in the text,
and reports any file that it cannot open as absent.
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
"""The errno in error texts of safetensors and torch."""


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors, replacing the file; `OSError` if the disk is full or fails."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        raise disk_error(error, path) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors on the CPU; `SafetensorError` if it is damaged, else `OSError`."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise disk_error(error, path) from error


def own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is a view: writing a view writes its whole storage."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def disk_error(error: BaseException, path: Path) -> BaseException:
    """Return the `OSError` with the errno that an error's text names; else the error itself."""
    known = isinstance(error, SafetensorError | OSError | RuntimeError)
    if not known or getattr(error, "errno", None):
        return error
    if told := _ERRNO.search(str(error)):
        number = int(told[1] or told[2])
        return OSError(number, os.strerror(number), str(path))
    # The library says "No such file" for every file that it cannot open.
    named = Path(str(error).rpartition(": ")[2])
    if isinstance(error, FileNotFoundError) and named.exists():
        return OSError(errno.EIO, "cannot be opened", str(named))
    return error


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model directory one at a time, with their names in the files."""
    for shard in sorted(model_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
