"""The images of a batch of sequences, cut into patches: frozen, with shapes.

Letters: B sequences, I images of all sequences in the order of their placeholder tokens, P patches
of all images end to end, D values of a patch (channels x frames x height x width).
Does not promise that the patches fit a model or the placeholder tokens of the sequences: the
training engine checks that before each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImagePatches:
    """The images of B sequences; there is at least one.

    Attributes:
        pixel_values_PD: (P, D) float32, as the image processor of the model lays patches out.
        grid_thw_I3: (I, 3) int64, patches of each image along time, height and width.
        num_images_B: (B,) int64, images of each sequence.
    """

    pixel_values_PD: Tensor
    grid_thw_I3: Tensor
    num_images_B: Tensor

    def __post_init__(self) -> None:
        num_images = self.grid_thw_I3.shape[0]
        if self.pixel_values_PD.dim() != 2 or self.grid_thw_I3.shape != (num_images, 3):
            raise ValueError(
                f"patches {tuple(self.pixel_values_PD.shape)} and grids "
                f"{tuple(self.grid_thw_I3.shape)}; need (P, D) and (I, 3)"
            )
        if num_images == 0:
            raise ValueError("no image; a batch without images has None")
        if int(self.num_images_B.sum()) != num_images:
            raise ValueError(
                f"num_images_B sums to {int(self.num_images_B.sum())}, grids are {num_images}"
            )
        num_patches = int(self.grid_thw_I3.prod(1).sum())
        if num_patches != self.pixel_values_PD.shape[0]:
            raise ValueError(
                f"grids have {num_patches} patches, pixel_values_PD {self.pixel_values_PD.shape[0]}"
            )

    @staticmethod
    def from_sequences(
        images: Sequence[Sequence[tuple[Tensor, tuple[int, int, int]]]],
    ) -> "ImagePatches | None":
        """Lay the images of sequences end to end.

        Args:
            images: of each sequence: (patches (t * h * w, D), its grid (t, h, w)) of each image.

        Returns:
            None when no sequence has an image.
        """
        flat = [image for sequence in images for image in sequence]
        if not flat:
            return None
        return ImagePatches(
            torch.cat([patches for patches, _ in flat]).float(),
            torch.tensor([grid for _, grid in flat], dtype=torch.int64),
            torch.tensor([len(sequence) for sequence in images], dtype=torch.int64),
        )

    @property
    def num_patches_I(self) -> Tensor:
        """(I,) int64 patches of each image."""
        return self.grid_thw_I3.prod(1)

    def select(self, sequences: Sequence[int]) -> "ImagePatches | None":
        """The images of the named sequences, in the given order; None when they have none."""
        patches = self.pixel_values_PD.split(self.num_patches_I.tolist())
        ends = self.num_images_B.cumsum(0).tolist()
        counts = self.num_images_B.tolist()
        chosen = [i for b in sequences for i in range(ends[b] - counts[b], ends[b])]
        if not chosen:
            return None
        return ImagePatches(
            torch.cat([patches[i] for i in chosen]),
            self.grid_thw_I3[chosen],
            self.num_images_B[list(sequences)],
        )

    def to(self, device: torch.device | str) -> "ImagePatches":
        """The same images on another device."""
        return ImagePatches(
            self.pixel_values_PD.to(device),
            self.grid_thw_I3.to(device),
            self.num_images_B.to(device),
        )
