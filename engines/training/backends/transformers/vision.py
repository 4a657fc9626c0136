"""Images in the forward pass of a vision-language model: inputs, positions, features.

Every rank runs the vision tower once in each forward pass, so that ranks with and without images
run the same collectives. The tower sees an image once, even if several sequences contain it.
Does not cover: video and audio, Ulysses (it would cut images), value models.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from engines.images import ImagePatches
from engines.training.model.attention import ATTENTION_NAME
from engines.training.model.image_layout import ImageLayout
from engines.types import TokenBatch
from engines.vision.processor import image_positions

_DUMMY = "dummy_image"


def sees_images(config: PretrainedConfig) -> bool:
    """True if the configuration is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def attention_names(config: PretrainedConfig) -> str | dict[str, str]:
    """Return `attn_implementation`: packed for the language model; a tower keeps its own."""
    if not sees_images(config):
        return ATTENTION_NAME
    names = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
    return {name: value for name, value in names.items() if not name or name in config.sub_configs}


def language_model_prefix(model: PreTrainedModel) -> str:
    """Return the name prefix of the language model's modules; "" if it is the whole model."""
    if not sees_images(model.config):
        return ""
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder) + "."


def at_every_place(features: Tensor, sizes: Sequence[int], image_index: Sequence[int]) -> Tensor:
    """Repeat the (F, D) features of distinct images, `sizes` of each, as `image_index` shows them.

    Gradients of a repeated image are summed in float32 and rounded once.
    """
    of_images = features.float().split(list(sizes))
    return torch.cat([of_images[image] for image in image_index]).to(features.dtype)


class Vision:
    """Feeds images to a vision-language model, to which it adds hooks."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        vision = config.vision_config
        self.layout = ImageLayout(
            token_id=config.image_token_id,
            merge_size=vision.spatial_merge_size,
            patch_width=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )
        # Hooks fit here: only single layers and the root are sharded units.
        self._inner: Any = model.model
        self._inner.language_model.register_forward_pre_hook(
            self._add_dummy_image, with_kwargs=True
        )
        self._images: ImagePatches | None = None
        tower: nn.Module = self._inner.visual
        tower.register_forward_pre_hook(self._see_each_image_once, with_kwargs=True)
        tower.register_forward_hook(self._show_at_every_place)

    def inputs(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the model's keyword arguments for the next forward pass."""
        self._images = images = batch.images
        # (3, 1, T) int64 of time, height and width, each sequence from 0. With a fourth row, of
        # plain positions, the model would detect packing by itself.
        positions = image_positions(self._inner, batch, self.layout.token_id)
        inputs: dict[str, Any] = {"position_ids": positions.to(batch.input_ids_T.device)}
        if images is None:
            return inputs | {_DUMMY: True}
        return inputs | {
            "pixel_values": torch.cat(images.patches).to(batch.input_ids_T.device),
            "image_grid_thw": images.grid_thw_I3,
        }

    def _see_each_image_once(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the tower the grids of distinct images; the model gets those of all places."""
        own = {} if self._images is None else {"grid_thw": self._images.grid_thw_U3}
        return args, {**kwargs, **own}

    def _show_at_every_place(self, module: nn.Module, args: tuple[Any, ...], seen: Any) -> Any:
        images, self._images = self._images, None
        index = [] if images is None else images.image_index_I.tolist()
        if images is None or index == list(range(len(index))):
            return seen
        shown = partial(
            at_every_place,
            sizes=self.layout.num_features(images.grid_thw_U3).tolist(),
            image_index=index,
        )
        seen.pooler_output = shown(seen.pooler_output)
        # Qwen3-VL also returns features of inner blocks.
        if deep := getattr(seen, "deepstack_features", None):
            seen.deepstack_features = [shown(features) for features in deep]
        return seen

    def _add_dummy_image(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the tower on a dummy image in a micro-batch without images, with the same result.

        Each layer of the tower runs collectives: a rank that skips it would block the ranks that
        have images. The tower runs here, between embedding and first decoder layer, as it does with
        images. Its features are multiplied by zero.
        """
        kwargs = dict(kwargs)
        if not kwargs.pop(_DUMMY, False):
            return args, kwargs
        embeds: Tensor = kwargs["inputs_embeds"]
        size = self.layout.merge_size
        grid_thw_I3 = torch.tensor([[1, size, size]], device=embeds.device)
        pixel_values_PD = embeds.new_zeros(size * size, self.layout.patch_width)
        seen = self._inner.get_image_features(pixel_values_PD, grid_thw_I3, return_dict=True)
        # Qwen3-VL also passes features of inner blocks to its first decoder layers.
        deep = getattr(seen, "deepstack_features", None) or ()
        features = [*seen.pooler_output, *(feature for layer in deep for feature in layer)]
        zero = torch.stack([feature.float().sum() for feature in features]).sum() * 0.0
        kwargs["inputs_embeds"] = embeds + zero.to(embeds.dtype)
        return args, kwargs
