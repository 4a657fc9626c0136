"""Turn images into model inputs, patches and placeholder tokens, by the model's own processor.

Promises: patches equal those of transformers' Pillow image processor, so rollout and training see
the same image. `image_positions` gives the positions of tokens among images, for the rotary
embedding. Covers the architectures of `VISION_MODEL_TYPES`, which share that processor.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.checkpoint.model_directory import VISION_MODEL_TYPES, vision_model_type
from engines.data.image_store import FORMATS, ImageFile
from engines.data.read.rows import RLRow, RowError
from engines.images import ImagePatches
from engines.types import TokenBatch
from engines.vision.sizes import PROCESSOR_FILES, image_sizes
from infra.errors import ConfigError


class ImageProcessor:
    """Makes patches from encoded images, for the model in `hf_dir`.

    Raises:
        ConfigError: the model is not a supported vision model, or has no usable processor.
    """

    def __init__(self, hf_dir: Path) -> None:
        sees = vision_model_type(hf_dir)
        if sees not in VISION_MODEL_TYPES:
            raise ConfigError(
                "model.path",
                f"{hf_dir} is {f'a {sees}' if sees else 'a text model'}; need one that sees images "
                f"({', '.join(VISION_MODEL_TYPES)}), as rows of the data show images; choose one, "
                "or leave out such rows",
            )
        sizes = image_sizes(hf_dir)
        if sizes is None:
            raise ConfigError(
                "model.path",
                f"{hf_dir} has no configuration of an image processor; need "
                f"{' or '.join(PROCESSOR_FILES)}; copy it beside the weights",
            )
        try:
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(
                hf_dir, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                "model.path",
                f"{hf_dir} has a configuration of an image processor that transformers refuses "
                f"({error}); copy it again",
            ) from None
        config: Any = AutoConfig.from_pretrained(
            hf_dir, trust_remote_code=False, local_files_only=True
        )
        self.num_tokens = sizes.num_tokens
        """See `ImageSizes.num_tokens`."""
        self.token_id: int = config.image_token_id

    def patches(self, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
        """Return an encoded image's patches, (t * h * w, D) float32, and its grid (t, h, w)."""
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            found = self._processor(images=[image], return_tensors="pt")
        t, h, w = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (t, h, w)

    def of_sequences(self, images: Sequence[Sequence[bytes]]) -> ImagePatches | None:
        """Return the patches of the images of sequences; None without images. Decodes each once."""
        unique = dict.fromkeys(data for sequence in images for data in sequence)
        made = {data: self.patches(data) for data in unique}
        return ImagePatches.from_sequences([[made[data] for data in row] for row in images])


class PromptImages:
    """Reads the prompts' images, and repeats their placeholder tokens as one model needs them."""

    def __init__(self, processor: ImageProcessor, images: ImageFile) -> None:
        self.processor, self._images = processor, images

    def expanded(self, row: RLRow, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt's token ids with its one placeholder per image repeated as needed.

        Raises:
            RowError: the number of placeholders is wrong, or the model refuses an image's shape.
        """
        token_id = self.processor.token_id
        num_found = prompt_ids.count(token_id)
        if num_found != len(row.images):
            raise RowError(
                f"the prompt has {num_found} placeholder tokens ({token_id}) for "
                f"{len(row.images)} images; need one each; leave out the row if its text holds "
                "some, or set model.chat_template to the template of this model"
            )
        sizes = iter([self._images.size(image.sha256) for image in row.images])
        ids: list[int] = []
        for token in prompt_ids:
            ids += [token] * (self.processor.num_tokens(*next(sizes)) if token == token_id else 1)
        return tuple(ids)

    def encoded(self, row: RLRow) -> tuple[bytes, ...]:
        """Read the encoded images of a row from the data set."""
        return tuple(self._images.read(image.sha256) for image in row.images)


def prompt_images(hf_dir: Path, path: Path) -> PromptImages | None:
    """Return a reader of the image file at `path`, for a model; None if the data set has no images.

    Raises:
        ConfigError: there are images, but the model cannot read them.
    """
    images = ImageFile.open(path)
    return PromptImages(ImageProcessor(hf_dir), images) if images.places else None


def image_positions(model: Any, batch: TokenBatch, token_id: int) -> Tensor:
    """Return the positions of a packed row, (3, 1, T) int64 on the CPU: time, height, width.

    Each sequence gets the positions that `model`, a transformers model without its head, gives it
    alone, from 0. The placeholder `token_id` occurs once per image feature.
    """
    images = batch.images
    plain_T = batch.position_ids_T.cpu()
    if images is None:
        return plain_T.expand(3, 1, -1)
    # On the CPU, since `get_rope_index` loops over the images of a sequence.
    counts = images.num_images_B.tolist()
    grids = images.grid_thw_I3.cpu().split(counts)
    lengths = batch.lengths_B.tolist()
    ids = batch.input_ids_T.cpu().split(lengths)
    rows = list(plain_T.expand(3, 1, -1).split(lengths, dim=2))
    for i, count in enumerate(counts):
        if count:
            row = ids[i].unsqueeze(0)
            rows[i], _ = model.get_rope_index(
                row, mm_token_type_ids=(row == token_id).int(), image_grid_thw=grids[i]
            )
    return torch.cat(rows, dim=2)
