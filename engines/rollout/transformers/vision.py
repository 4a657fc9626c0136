"""Images into the prefill of a rollout model, and where rotary positions go on behind them.

Promises: features and positions are those of the trainer's forward pass over the same sequence
(`engines.vision.positions`). Behind its prompt a sequence's rotary position is its place plus a
number of its own, since an image takes fewer positions than places. A placeholder is never sampled:
it would stand for an image that nobody has. Its probability, next to nothing in a trained model, is
missing from the distribution, which the trainer's has whole.
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
"""`attn_implementation` of a model that sees: its tower keeps one of transformers."""


@dataclass(frozen=True)
class SeenPrompts:
    """What the prefill of sequences takes besides their tokens.

    Attributes:
        position_31T: (3, 1, T) int64 rotary positions along time, height and width.
        ahead_P: (P,) int64, how far the rotary position of a sequence's next token is from its
            place.
        inputs: keyword arguments of the model: the images, if there are any.
    """

    position_31T: Tensor
    ahead_P: Tensor
    inputs: dict[str, Tensor]


class Vision:
    """Shows images to a model.

    Args:
        model: that sees.
        hf_dir: its directory; the image processor is read when the first image comes.
    """

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
        """Prepare the prefill of sequences.

        Args:
            sequences: token ids of each, with a run of placeholders for each of its images.
            images: files of each sequence.

        Returns:
            On the CPU.

        Raises:
            RolloutError: placeholders and images of a sequence do not fit.
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
        """Refuse tokens that stand for images where none are given.

        Args:
            input_ids_T: (T,) int64.

        Raises:
            RolloutError: there is one.
        """
        placeholders = torch.tensor(self._placeholders, device=input_ids_T.device)
        found_N = input_ids_T[torch.isin(input_ids_T, placeholders)]
        if len(found_N):
            raise RolloutError(
                f"{len(found_N)} tokens of a prompt stand for images, the first {int(found_N[0])}; "
                "its logprobs are those of a text alone; ask about texts"
            )

    def without_placeholders(self, logits: Tensor) -> Tensor:
        """Logits (..., V), changed in place: no placeholder is drawn."""
        logits[..., self._placeholders] = -torch.inf
        return logits

    def _check(self, batch: TokenBatch) -> None:
        """As many placeholders as features: the model itself looks at the sum alone."""
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
