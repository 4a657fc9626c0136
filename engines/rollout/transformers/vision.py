"""Passes images into the prefill of a rollout model, with their rotary positions.

Promises: features and positions are those of the trainer's forward pass
(`engines.vision.positions`). Behind the prompt a rotary position is the place plus a fixed offset,
since an image takes fewer positions than places. A placeholder is never sampled; its small
probability is missing from the distribution, while the trainer's distribution includes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.errors import RolloutError
from engines.rollout.transformers.attention import ATTENTION_NAME
from engines.types import TokenBatch
from engines.vision.positions import image_positions
from engines.vision.processor import ImageProcessor

ATTENTION = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
"""`attn_implementation` of a model with images: the vision tower uses transformers' own."""


@dataclass(frozen=True)
class SeenPrompts:
    """Inputs for the prefill of sequences besides their tokens.

    Attributes:
        position_31T: (3, 1, T) int64 rotary positions along time, height and width.
        ahead_P: (P,) int64, offset from the place of the next token to its rotary position.
    """

    position_31T: Tensor
    ahead_P: Tensor
    inputs: dict[str, Tensor]


class Vision:
    """Prepares images for a model; the image processor is loaded for the first image."""

    def __init__(self, model: nn.Module, hf_dir: Path) -> None:
        inner: Any = model
        self._inner: Any = inner.model
        self._token_id: int = inner.config.image_token_id
        names = ("image_token_id", "video_token_id")
        self._placeholders = [i for n in names if (i := getattr(inner.config, n, None)) is not None]
        self._hf_dir = hf_dir
        self._processor: ImageProcessor | None = None

    def see(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]]
    ) -> SeenPrompts:
        """Prepare CPU inputs for the prefill of sequences with a run of placeholders per image.

        Raises:
            RolloutError: placeholders and images of a sequence do not match.
        """
        patches = None
        if any(images):
            self._processor = self._processor or ImageProcessor(self._hf_dir)
            patches = self._processor.of_sequences(images)
        batch = TokenBatch.from_sequences(sequences, images=patches)
        self._check(batch)
        position_31T = image_positions(self._inner, batch, self._token_id)
        lengths = batch.lengths_B.tolist()
        ahead = [
            int(position.max()) + 1 - length
            for position, length in zip(position_31T.split(lengths, dim=2), lengths, strict=True)
        ]
        inputs = {}
        if patches is not None:
            inputs = {
                "pixel_values": patches.pixel_values_PD,
                "image_grid_thw": patches.grid_thw_I3,
            }
        return SeenPrompts(position_31T, torch.tensor(ahead), inputs)

    def check_text(self, input_ids_T: Tensor) -> None:
        """Raise a RolloutError if one of the (T,) int64 tokens stands for an image."""
        placeholders = torch.tensor(self._placeholders, device=input_ids_T.device)
        found_N = input_ids_T[torch.isin(input_ids_T, placeholders)]
        if len(found_N):
            raise RolloutError(
                f"{len(found_N)} tokens of a prompt stand for images, the first {int(found_N[0])}; "
                "its logprobs are those of a text alone; ask about texts"
            )

    def without_placeholders(self, logits: Tensor) -> Tensor:
        """Exclude placeholders from logits (..., V), changed in place."""
        logits[..., self._placeholders] = -torch.inf
        return logits

    def _check(self, batch: TokenBatch) -> None:
        """Compare placeholders and features per sequence; the model compares only the sums."""
        held_B = torch.zeros(batch.num_sequences, dtype=torch.int64).index_add_(
            0, batch.sequence_index_T, (batch.input_ids_T == self._token_id).long()
        )
        wanted_B = torch.zeros_like(held_B)
        if batch.images is not None:
            merged = self._inner.config.vision_config.spatial_merge_size**2
            of_image = torch.arange(batch.num_sequences).repeat_interleave(
                batch.images.num_images_B
            )
            wanted_B.index_add_(0, of_image, batch.images.num_patches_I // merged)
        if not torch.equal(held_B, wanted_B):
            place = int((held_B != wanted_B).nonzero()[0])
            raise RolloutError(
                f"a prompt has {int(held_B[place])} image placeholder tokens; its images need "
                f"{int(wanted_B[place])}"
            )
