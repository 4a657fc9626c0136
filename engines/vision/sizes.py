"""Number of placeholder tokens of an image, from its size and the model's processor configuration.

Promises: equals transformers' `Qwen2VLImageProcessorPil` for the same directory, without importing
transformers or torch. Covers `VISION_MODEL_TYPES`, which share that processor.
Source: the resizing of Qwen2-VL (arXiv:2409.12191 sec. 2.1), as transformers computes it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.checkpoint.model_directory import VISION_MODEL_TYPES, read_json, vision_model_type
from engines.data.read.rows import RowError
from infra.errors import ConfigError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model directory; one of them configures the image processor."""
_NESTED = "image_processor"
"""Key in the second file, which has priority; the first file is the older form."""
_MAX_RATIO = 200
_PATCH_SIZE, _MERGE_SIZE = 14, 2
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
"""Defaults of transformers; both edges are numbers of pixels."""


@dataclass(frozen=True)
class ImageSizes:
    """Size rules of a model's image processor, which scales images to fit the pixel limits.

    `patch_size` is in pixels; `merge_size` is the number of patches along a side of one token.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def num_tokens(self, width: int, height: int) -> int:
        """Return the placeholder tokens of an image of `width` times `height` pixels.

        Raises:
            RowError: the aspect ratio is not supported.
        """
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise RowError(
                f"an image of {width} x {height} pixels is too long for this model; need sides of "
                f"at most {_MAX_RATIO} to 1; leave out such rows"
            )
        side = self.patch_size * self.merge_size
        rows, columns = round(height / side), round(width / side)
        num_pixels = rows * columns * side**2
        if num_pixels > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif num_pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(edge * scale / side) for edge in (height, width))
        return rows * columns


def image_sizes(hf_dir: Path) -> ImageSizes | None:
    """Return the size rules of a model; None without a supported vision model or processor file.

    Raises:
        ConfigError: the configuration cannot be read, or has unusable values.
    """
    if vision_model_type(hf_dir) not in VISION_MODEL_TYPES:
        return None
    older, newer = (hf_dir / name for name in PROCESSOR_FILES)
    found = read_json(newer).get(_NESTED)
    if found is None and not older.exists():
        return None
    config: Mapping[str, Any] = read_json(older) if found is None else found
    size = _given(config.get("size"), _SIZE)
    edges = size if isinstance(size, dict) else {}
    sizes = ImageSizes(
        patch_size=config.get("patch_size", _PATCH_SIZE),
        merge_size=config.get("merge_size", _MERGE_SIZE),
        min_pixels=_given(config.get("min_pixels"), edges.get("shortest_edge")),
        max_pixels=_given(config.get("max_pixels"), edges.get("longest_edge")),
    )
    for name, value in asdict(sizes).items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                "model.path",
                f"{hf_dir}: its image processor has {name} {value}; need a whole number from 1; "
                "set size to shortest_edge and longest_edge, or copy its configuration again",
            )
    return sizes


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
