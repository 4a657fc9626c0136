"""A model that sees images, on one device: batches with, without and with mixed images.

Losses and gradient norms of three steps are compared with the CPU's in float32; the CPU half of
that is held against plain transformers in tests/unit/engines/training/backends/transformers.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from engines.algorithms.supervised import SupervisedLoss
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.images import ImagePatches
from engines.training.base import BaseEngine, create_engine
from engines.types import TokenBatch
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform

IMAGE, START, END = 500, 501, 502
PATCH_WIDTH = 3 * 2 * 4 * 4
GRIDS = {
    "images": [[(1, 4, 6)], [(1, 2, 2), (1, 4, 4)]],
    "text": [[], []],
    "mixed": [[(1, 4, 6)], []],
}
TOLERANCE = {"float32": (2e-4, 1e-3), "bfloat16": (3e-2, 8e-2)}
"""Of a loss (absolute) and of a gradient norm (relative)."""


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL of 0.5 M float32 parameters; windows in the first block of its tower."""
    directory = tmp_path_factory.mktemp("vision")
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
            "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "in_channels": 3, "hidden_size": 64,
            "intermediate_size": 96, "out_hidden_size": 128, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, video_token_id=503, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


def make_batch(step: int, rows: list[list[tuple[int, int, int]]]) -> TokenBatch:
    """Sequences of words and images; words are trained on."""
    generator = torch.Generator().manual_seed(step)
    ids, images, masks = [], [], []
    for grids in rows:
        sequence = torch.randint(4, 480, (24,), generator=generator).tolist()
        seen = []
        for t, h, w in grids:
            words = torch.randint(4, 480, (6,), generator=generator).tolist()
            sequence += [START, *[IMAGE] * (t * h * w // 4), END, *words]
            seen.append((torch.randn(t * h * w, PATCH_WIDTH, generator=generator), (t, h, w)))
        ids.append(sequence)
        images.append(seen)
        masks.append([float(i > 0 and token < IMAGE) for i, token in enumerate(sequence)])
    return TokenBatch.from_sequences(
        ids, images=ImagePatches.from_sequences(images), loss_mask=masks
    )


def new_engine(path: Path, platform: PlatformBase, dtype: str) -> BaseEngine:
    """An initialized engine that trains."""
    training = TrainingConfig.model_validate({"dtype": dtype, "collective_timeout_s": 60.0})
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    engine = create_engine("language_model", path, training, optimizer, 3, platform, seed=0)
    engine.initialize()
    return engine


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("rows", GRIDS)
def test_a_model_that_sees_trains_as_on_the_cpu(
    platform: PlatformBase, vision_dir: Path, rows: str, dtype: str
) -> None:
    batches = [make_batch(step, GRIDS[rows]) for step in range(3)]
    engine = new_engine(vision_dir, platform, dtype)
    ours = [engine.train_batch(batch, SupervisedLoss()) for batch in batches]
    twin = new_engine(vision_dir, CPUPlatform(), "float32")
    theirs = [twin.train_batch(batch, SupervisedLoss()) for batch in batches]
    loss, norm = TOLERANCE[dtype]
    for found, expected in zip(ours, theirs, strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=loss)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=norm)
