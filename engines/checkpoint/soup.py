"""Mean of several models' weights, tensor by tensor (model soups, arXiv:2203.05482 sec. 3).

Promises: at most two tensors are in memory besides those the caller keeps; the sum is in float32 in
the order of the models, so that the same models give the same bytes.
Does not promise a good model: for that the models must share a starting point.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from infra.errors import ConfigError

_FIELD = "soup"


def mean_tensors(model_dirs: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the float32 mean of every weight, in the order of the first model's files.

    Weights that are not floating point are yielded unchanged. Raises `ConfigError` if the models
    have different weights, or such weights differ.
    """
    with ExitStack() as stack:
        opened = [_opened(directory, stack) for directory in model_dirs]
        first, *others = opened
        for directory, other in zip(model_dirs[1:], others, strict=True):
            _check_same(first, other, directory)
        for name in first:
            total = first[name].get_tensor(name)
            if not total.is_floating_point():
                if not all(torch.equal(total, other[name].get_tensor(name)) for other in others):
                    raise ConfigError(
                        _FIELD,
                        f"the models differ in {name}, a {total.dtype} tensor without an average; "
                        "choose models with equal ones",
                    )
                yield name, total
                continue
            total = total.to(torch.float32, copy=True)
            for other in others:
                total += other[name].get_tensor(name)
            yield name, total.div_(len(opened))


def _opened(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        found.update(dict.fromkeys(file.keys(), file))
    return found


def _check_same(first: dict[str, safe_open], other: dict[str, safe_open], directory: Path) -> None:
    for name in sorted(first.keys() | other.keys()):
        shapes = [
            tuple(held[name].get_slice(name).get_shape()) if name in held else "none"
            for held in (first, other)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                _FIELD,
                f"{directory} has {shapes[1]} as {name}, the first model {shapes[0]}; need models "
                "of one architecture",
            )
