"""Images as a model takes them: patches and placeholder tokens, by the model's own processor.

Promises: patches are those of transformers' image processor (the one that needs Pillow alone), so
what samples and what trains see one and the same image; how many tokens an image takes is known
from its size, without decoding it.
Covers the architectures of `VISION_MODEL_TYPES`, which share that processor.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.checkpoint.model_directory import VISION_MODEL_TYPES, vision_model_type
from engines.data.images.store import FORMATS, ImageFile
from engines.data.read.rows import RLRow, RowError
from engines.images import ImagePatches
from engines.vision.sizes import PROCESSOR_FILES, image_sizes
from infra.errors import ConfigError


class ImageProcessor:
    """Makes patches of files.

    Args:
        hf_dir: of the model, with `config.json` and its processor's configuration.

    Raises:
        ConfigError: the model sees no images, is of another architecture, or has no processor.
    """

    def __init__(self, hf_dir: Path) -> None:
        sees = vision_model_type(hf_dir)
        if sees not in VISION_MODEL_TYPES:
            raise ConfigError(
                "model.path",
                f"{hf_dir} is {f'a {sees}' if sees else 'a text model'}; need one that sees images "
                f"({', '.join(VISION_MODEL_TYPES)}), for rows of the data show some; choose one, "
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
            made: Any = Qwen2VLImageProcessorPil.from_pretrained(hf_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "model.path",
                f"{hf_dir} has a configuration of an image processor that transformers refuses "
                f"({error}); copy it again",
            ) from None
        config: Any = AutoConfig.from_pretrained(
            hf_dir, trust_remote_code=False, local_files_only=True
        )
        self._processor = made
        self._sizes = sizes
        self.token_id: int = config.image_token_id

    def num_tokens(self, width: int, height: int) -> int:
        """Placeholder tokens of an image of this size; see `ImageSizes.num_tokens`."""
        return self._sizes.num_tokens(width, height)

    def patches(self, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
        """The patches of an image.

        Args:
            data: of a file.

        Returns:
            (t * h * w, D) float32 and the grid (t, h, w).
        """
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            found = self._processor(images=[image], return_tensors="pt")
        t, h, w = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (t, h, w)

    def of_sequences(self, images: Sequence[Sequence[bytes]]) -> ImagePatches | None:
        """The images of sequences; those that come again are decoded once.

        Args:
            images: files of each sequence.

        Returns:
            None when no sequence has an image.
        """
        unique = dict.fromkeys(data for sequence in images for data in sequence)
        made = {data: self.patches(data) for data in unique}
        return ImagePatches.from_sequences([[made[data] for data in row] for row in images])


class PromptImages:
    """The images of a data set's prompts, for one model.

    Args:
        processor: of the model.
        images: of the data set.
    """

    def __init__(self, processor: ImageProcessor, images: ImageFile) -> None:
        self.processor, self._images = processor, images

    def expanded(self, row: RLRow, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """A prompt with as many placeholder tokens as its images take.

        Args:
            row: whose prompt it is; with or without images.
            prompt_ids: with one placeholder token for each image.

        Returns:
            Token ids.

        Raises:
            RowError: the prompt has another number of placeholders, or an image no shape for this
                model.
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
        """The files of a row's images, read from the data set now."""
        return tuple(self._images.read(image.sha256) for image in row.images)


def prompt_images(hf_dir: Path, path: Path) -> PromptImages | None:
    """The images of a data set for a model; None where the data set has none.

    Args:
        hf_dir: of the model.
        path: of the images (`Dataset.images_path`).

    Returns:
        They.

    Raises:
        ConfigError: there are some, and the model does not see them.
    """
    images = ImageFile.open(path)
    return PromptImages(ImageProcessor(hf_dir), images) if images.places else None
