"""The images of a batch of sequences, cut into patches.

Letters: B sequences; I places where an image is shown, in the order of their placeholder tokens;
U distinct images, each shown at one or more places; P patches; D values of a patch
(channels x frames x height x width).
Promises: an image is held once, however many samples of its prompt there are; a selection refers to
the same tensors, and only the images of the selected sequences are sent to other processes.
Does not promise that patches match the model: the training engine checks this before each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImagePatches:
    """The images of B sequences: at least one image, and each is shown by some sequence.

    Attributes:
        patches: U tensors (P, D) float32 in the layout of the model's image processor, on the
            device where they were made. `from_sequences` gives each its own storage, because
            pickling a view writes the whole storage.
        grid_thw_U3: (U, 3) int64, number of patches along time, height and width.
        image_index_I: (I,) int64, the image shown at each place.
        num_images_B: (B,) int64, number of places of each sequence.
    """

    patches: tuple[Tensor, ...]
    grid_thw_U3: Tensor
    image_index_I: Tensor
    num_images_B: Tensor

    def __post_init__(self) -> None:
        num_images, shapes = len(self.patches), [tuple(each.shape) for each in self.patches]
        widths = {shape[1:] for shape in shapes}
        flat = all(len(shape) == 2 for shape in shapes) and len(widths) <= 1
        if not flat or self.grid_thw_U3.shape != (num_images, 3):
            raise ValueError(
                f"patches {shapes[:5]} and grids {tuple(self.grid_thw_U3.shape)}; need (P, D) for "
                "each image, with the same D, and (U, 3)"
            )
        if num_images == 0:
            raise ValueError("no image; a batch without images has None")
        if self.image_index_I.unique().tolist() != list(range(num_images)):
            raise ValueError(
                f"image_index_I names {self.image_index_I.unique().tolist()[:5]} of {num_images} "
                "images; need each of them, and no other"
            )
        num_places = self.image_index_I.numel()
        if int(self.num_images_B.sum()) != num_places:
            raise ValueError(
                f"num_images_B sums to {int(self.num_images_B.sum())}, places are {num_places}"
            )
        needed = self.grid_thw_U3.prod(1).tolist()
        if needed != [shape[0] for shape in shapes]:
            raise ValueError(f"grids have {needed[:5]} patches, images {shapes[:5]}")

    @staticmethod
    def from_sequences(
        images: Sequence[Sequence[tuple[Tensor, tuple[int, int, int]]]],
    ) -> "ImagePatches | None":
        """Lay the images of sequences end to end; None without images.

        An image is (patches (t * h * w, D), grid (t, h, w)). Images that are the same tensor object
        are held once.
        """
        flat = [image for sequence in images for image in sequence]
        if not flat:
            return None
        unique = {(id(patches), grid): patches for patches, grid in flat}
        places = {key: place for place, key in enumerate(unique)}
        return ImagePatches(
            tuple(_of_its_own(patches) for patches in unique.values()),
            torch.tensor([grid for _, grid in unique], dtype=torch.int64),
            torch.tensor([places[id(patches), grid] for patches, grid in flat], dtype=torch.int64),
            torch.tensor([len(sequence) for sequence in images], dtype=torch.int64),
        )

    @property
    def grid_thw_I3(self) -> Tensor:
        """(I, 3) int64 grid of the image at each place."""
        return self.grid_thw_U3[self.image_index_I]

    @property
    def num_patches_I(self) -> Tensor:
        """(I,) int64 number of patches of the image at each place."""
        return self.grid_thw_I3.prod(1)

    @property
    def pixel_values_PD(self) -> Tensor:
        """(P, D) float32 copy of the patches of all places end to end, for a forward pass."""
        return torch.cat([self.patches[image] for image in self.image_index_I.tolist()])

    def select(self, sequences: Sequence[int]) -> "ImagePatches | None":
        """Return the images of the given sequences in that order, or None if they have none."""
        of_sequences = self.image_index_I.split(self.num_images_B.tolist())
        shown = [image for b in sequences for image in of_sequences[b].tolist()]
        if not shown:
            return None
        chosen = {image: place for place, image in enumerate(dict.fromkeys(shown))}
        return ImagePatches(
            tuple(self.patches[image] for image in chosen),
            self.grid_thw_U3[list(chosen)],
            self.image_index_I.new_tensor([chosen[image] for image in shown]),
            self.num_images_B[list(sequences)],
        )

    def to(self, device: torch.device | str) -> "ImagePatches":
        """Return the images with their indices on another device; the patches are not copied."""
        return ImagePatches(
            self.patches,
            self.grid_thw_U3.to(device),
            self.image_index_I.to(device),
            self.num_images_B.to(device),
        )


def _of_its_own(patches: Tensor) -> Tensor:
    """Return the patches as float32 in a storage of their own."""
    patches = patches.float()
    return patches if patches.untyped_storage().nbytes() == patches.nbytes else patches.clone()
