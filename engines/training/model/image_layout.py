"""The layout of images that a model needs, and a check of the images of a batch.

Ranks exchange the result as a few numbers, so that all ranks raise before one enters the model and
waits in a collective.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engines.types import TokenBatch

_NOT_SEEN, _GRID, _WIDTH, _TOKENS = range(4)
_PROBLEMS = (
    "has an image, but this engine's model sees none",
    "has an image whose grid does not divide by the model's merge size {needed} in height and "
    "width",
    "has image patches of {found} values; the model needs {needed}",
    "has {found} image placeholder tokens; its images need {needed}, in one unbroken run for each "
    "image",
)


@dataclass(frozen=True)
class ImageLayout:
    """Layout of a model's images.

    Attributes:
        token_id: id of the placeholder token, which appears once for each image feature.
        merge_size: patches along height and along width that form one feature.
        patch_width: values of one patch.
    """

    token_id: int
    merge_size: int
    patch_width: int

    def num_features(self, grid_thw: Tensor) -> Tensor:
        """Return (N,) int64 numbers of features, and placeholder tokens, of grids (N, 3)."""
        return grid_thw.prod(1) // self.merge_size**2


class ImageFault(NamedTuple):
    """A sequence of a rank whose images do not fit; -1: all fit."""

    sequence: int = -1
    kind: int = 0
    found: int = 0
    needed: int = 0

    @property
    def problem(self) -> str:
        """Text of the fault, which continues "sequence ..."."""
        return _PROBLEMS[self.kind].format(found=self.found, needed=self.needed)


def find_image_fault(batch: TokenBatch, layout: ImageLayout | None) -> ImageFault:
    """Find a sequence whose images do not fit; `layout` None: the model sees no images."""
    images = batch.images
    first = int(images.num_images_B.nonzero()[0]) if images is not None else -1
    if layout is None:
        return ImageFault(first, _NOT_SEEN) if images is not None else ImageFault()
    num_sequences = batch.num_sequences
    wanted: list[list[int]] = [[] for _ in range(num_sequences)]
    if images is not None:
        width = images.patches[0].shape[1]
        if width != layout.patch_width:
            return ImageFault(first, _WIDTH, width, layout.patch_width)
        index_I = torch.arange(num_sequences).repeat_interleave(images.num_images_B)
        odd_I = (images.grid_thw_I3[:, 1:] % layout.merge_size).any(1)
        if odd_I.any():
            return ImageFault(int(index_I[odd_I][0]), _GRID, 0, layout.merge_size)
        for sequence, needed in zip(
            index_I.tolist(), layout.num_features(images.grid_thw_I3).tolist(), strict=True
        ):
            wanted[sequence].append(needed)
    for i, (held, needed) in enumerate(zip(_runs(batch, layout.token_id), wanted, strict=True)):
        if held != needed:
            return ImageFault(i, _TOKENS, sum(held), sum(needed))
    return ImageFault()


def _runs(batch: TokenBatch, token_id: int) -> list[list[int]]:
    """Return, for each sequence, the lengths of its runs of placeholder tokens."""
    is_image_T = batch.input_ids_T == token_id
    runs: list[list[int]] = [[] for _ in range(batch.num_sequences)]
    if not is_image_T.any():
        return runs
    goes_on_T = torch.zeros_like(is_image_T)
    goes_on_T[1:] = is_image_T[:-1]
    goes_on_T[batch.cu_seqlens[:-1].to(torch.int64)[batch.lengths_B > 0]] = False
    starts_T = is_image_T & ~goes_on_T
    lengths = torch.bincount(starts_T.cumsum(0)[is_image_T] - 1).tolist()
    for sequence, length in zip(batch.sequence_index_T[starts_T].tolist(), lengths, strict=True):
        runs[sequence].append(length)
    return runs
