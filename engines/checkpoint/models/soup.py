"""The mean of several models' weights, one tensor at a time (model soups, arXiv:2203.05482 sec. 3).

Promises: no more than two tensors are in memory beside what the caller keeps; the sum is taken in
float32, in the order of the models, so that the same models give the same bytes.
Does not promise that the mean is a good model: that holds for models that were trained from one
another, or from the same start.
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
    """The mean of every weight.

    Args:
        model_dirs: Hugging Face directories with the same weights, at least one.

    Yields:
        tuple[str, Tensor]: name and mean, float32; of weights that are no floating point numbers,
            which are equal in all of them, the first model's. In the order of the first's files.

    Raises:
        ConfigError: a model has other weights than the first, or others that cannot be averaged.
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
                    raise ConfigError(_FIELD, f"{name} is no number to average, and differs")
                yield name, total
                continue
            total = total.to(torch.float32, copy=True)
            for other in others:
                total += other[name].get_tensor(name)
            yield name, total.div_(len(opened))


def _opened(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    """The file of each weight."""
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
