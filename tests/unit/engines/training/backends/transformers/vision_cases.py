"""Tiny vision-language models, batches with images, and a reference that is transformers alone.

The reference runs one sequence at a time through the model's own forward pass, which finds the
positions itself, and takes log-softmax and AdamW from torch.
"""

import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image as Pillow
from rlhf.testing.plain_loop import adamw, take_step
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.config.data import DataConfig, SourceConfig
from engines.config.model import TokenizerConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.images import ImagePatches
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

IMAGE, START, END, VIDEO = 30, 31, 32, 33
"""Token ids: the placeholder of an image feature, what stands around each image, and another."""
_CHARACTERS = " +-0123456789=ABCDabcdxyz"[:24]
"""Ids 6 to 29, behind those of the roles."""
_MARKS = "\u2460\u2461\u2462\u2463"
"""Of `IMAGE`, `START`, `END` and `VIDEO`."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '\u2461\u2460\u2462' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_STEPS = 3
Grid = tuple[int, int, int]

_TEXT = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
_VISION = {"depth": 2, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2,
           "temporal_patch_size": 2, "in_channels": 3}  # fmt: skip
PATCH_WIDTH = 3 * 2 * 2 * 2
VISION_PARTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 8,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
"""The second has windows in its first block; the third feeds inner features to the decoder."""
_TEXT_PARTS: dict[str, dict[str, Any]] = {"qwen3_vl": {"head_dim": 8}}


def write_vision_model(path: Path, model_type: str = "qwen2_5_vl", **text: Any) -> Path:
    """Write a model of random float32 weights.

    Args:
        path: an existing directory.
        model_type: a key of `VISION_PARTS`.
        **text: of its text configuration.

    Returns:
        The directory.
    """
    config = AutoConfig.for_model(
        model_type,
        text_config={**_TEXT, **_TEXT_PARTS.get(model_type, {}), **text},
        vision_config={**_VISION, **VISION_PARTS[model_type]},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=bool(text.get("tie_word_embeddings")),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # The usual start is too small for images to matter, and norms of 1 hide errors.
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
    model.save_pretrained(path)
    return path


def write_processor(path: Path) -> Path:
    """Write the configuration of an image processor for the models above."""
    size = {"shortest_edge": 16, "longest_edge": 100}
    Qwen2VLImageProcessorPil(patch_size=2, size=size).save_pretrained(path)
    return path


def write_chat_model(path: Path) -> Path:
    """Write a model with tokenizer, chat template and image processor.

    It draws no placeholder, as a trained one: nothing is missing where they are left out.

    Args:
        path: a directory; made where it is not there.

    Returns:
        The directory.
    """
    path.mkdir(exist_ok=True)
    write_processor(write_vision_model(path))
    characters = [_CHARACTERS + _MARKS]
    train_tokenizer(TokenizerConfig(), characters, path, max_length=64, chat_template=CHAT_TEMPLATE)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 5.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][[IMAGE, VIDEO], 0] = -200.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def picture(seed: int, width: int = 12, height: int = 6) -> bytes:
    """A PNG of noise."""
    buffer = io.BytesIO()
    pixels = random.Random(seed).randbytes(width * height * 3)
    Pillow.frombytes("RGB", (width, height), pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_geometry(path: Path) -> Path:
    """Write a data set of eight problems, every other one with two images, of Geometry3k's layout.

    Args:
        path: a directory that is made; the table lies beside it.

    Returns:
        The directory.
    """
    rows = [
        {
            "images": [
                {"bytes": data, "path": None}
                for data in (picture(i), picture(9, 5, 13))[: 1 + i % 2]
            ],
            "problem": "<image>x=" + "<image>" * (i % 2),
            "answer": "3",
        }
        for i in range(8)
    ]
    table = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), table)
    source = SourceConfig(path=str(table), format="geometry3k", options={"instruction": ""})
    build_dataset(DataConfig(rl=(source,)), None, 0, path)
    return path


def make_batch(step: int, rows: Sequence[Sequence[Grid]]) -> TokenBatch:
    """One sequence per row: some words, then each image and some words.

    Args:
        step: seed; of the run, say.
        rows: grids of the images of each sequence.

    Returns:
        With the column `loss_mask`, which is 0 at images and at the first tokens.
    """
    generator = torch.Generator().manual_seed(1000 + step)

    def words() -> list[int]:
        count = int(torch.randint(2, 7, (1,), generator=generator))
        return torch.randint(3, 29, (count,), generator=generator).tolist()

    ids, images = [], []
    for grids in rows:
        sequence, seen = words(), []
        for grid in grids:
            t, h, w = grid
            sequence += [START, *[IMAGE] * (t * h * w // 4), END, *words()]
            seen.append((torch.randn(t * h * w, PATCH_WIDTH, generator=generator), grid))
        ids.append(sequence)
        images.append(seen)
    masks = [[float(i > 1 and x < IMAGE) for i, x in enumerate(sequence)] for sequence in ids]
    return TokenBatch.from_sequences(
        ids, images=ImagePatches.from_sequences(images), loss_mask=masks
    )


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Mean negative log-likelihood of the trained tokens."""
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def load(path: Path) -> nn.Module:
    """The plain model."""
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )


def plain_logprobs(model: nn.Module, batch: TokenBatch) -> list[Tensor]:
    """(length,) float32 of each sequence, each run alone; 0 for its first token."""
    found, next_image, next_patch = [], 0, 0
    ids_B = batch.input_ids_T.split(batch.lengths_B.tolist())
    for i, ids in enumerate(ids_B):
        inputs: dict[str, Any] = {"input_ids": ids[None]}
        count = int(batch.images.num_images_B[i]) if batch.images is not None else 0
        if batch.images is not None and count:
            grids = batch.images.grid_thw_I3[next_image : next_image + count]
            size = int(grids.prod(1).sum())
            patches = batch.images.pixel_values_PD[next_patch : next_patch + size]
            inputs |= {
                "pixel_values": patches,
                "image_grid_thw": grids,
                "mm_token_type_ids": (ids[None] == IMAGE).int(),
            }
            next_image, next_patch = next_image + count, next_patch + size
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        found.append(torch.cat([own.new_zeros(1), own]))
    return found


def plain_steps(
    model: nn.Module,
    batches: Sequence[TokenBatch],
    *,
    trained: Callable[[str], bool] = lambda name: True,
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of AdamW steps.

    Args:
        model: changed in place.
        batches: one per step, of all ranks together.
        trained: which parameters, by name.

    Returns:
        One pair per step.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    optimizer = adamw(model)
    results = []
    for batch in batches:
        mask = batch.columns["loss_mask"]
        loss = -(torch.cat(plain_logprobs(model, batch)) * mask).sum() / mask.sum()
        results.append(take_step(optimizer, loss))
    return results
