"""A round of RL over Geometry3k's rows: one image in what samples and in what trains."""

import io
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow
from vision_cases import (
    CHAT_TEMPLATE,
    END,
    IMAGE,
    START,
    VISION_PARTS,
    write_chat_model,
    write_processor,
    write_vision_model,
)

from engines.config.data import DataConfig, SourceConfig
from engines.data.images.processor import ImageProcessor, PromptImages, prompt_images
from engines.data.images.store import ImageFile
from engines.data.prepare.dataset import build_dataset
from engines.data.read.chat import render_prompts
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import rl_prompts
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import WeightSyncError
from engines.images import ImagePatches
from infra.errors import ConfigError


def figure(seed: int, width: int = 12, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    pixels = random.Random(seed).randbytes(width * height * 3)
    Pillow.frombytes("RGB", (width, height), pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return write_chat_model(path)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = [
        {
            "images": [{"bytes": figure(i), "path": None}]
            + [{"bytes": figure(9, 5, 13), "path": None}] * (i % 2),
            "problem": "<image>x=" + "<image>" * (i % 2),
            "answer": "3",
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = SourceConfig(path=str(tmp_path / "train.parquet"), options={"instruction": ""})
    source = source.model_copy(update={"format": "geometry3k"})
    build_dataset(DataConfig(rl=(source,)), None, 0, tmp_path / "dataset")
    return tmp_path / "dataset"


def test_prompts_make_room_for_their_images(model: Path, dataset: Path) -> None:
    tokenizer = DirectoryTokenizer.load(model)
    assert tokenizer.encode("\u2460\u2461\u2462", add_special_tokens=False) == [IMAGE, START, END]
    data = load_dataset(dataset)
    rows = data.rl_rows()
    images = prompt_images(model, data.images_path)
    assert images is not None
    prompts = rl_prompts(rows, tokenizer, 64, expanded=images.expanded)
    plain = render_prompts(tokenizer, [row.prompt for row in rows])
    for prompt, short, row in zip(prompts, plain, rows, strict=True):
        assert short.count(IMAGE) == len(row.images)
        patches = images.processor.of_sequences([images.encoded(row)])
        assert patches is not None
        assert prompt.prompt_ids.count(IMAGE) == len(patches.pixel_values_PD) // 4
        assert [i for i in prompt.prompt_ids if i != IMAGE] == [i for i in short if i != IMAGE]
    with pytest.raises(
        ConfigError, match="data: row 0 of the split shows images, which this stage"
    ):
        rl_prompts(rows, tokenizer, 64)
    twice = CHAT_TEMPLATE.replace("\u2460", "\u2460\u2460")
    with pytest.raises(ConfigError, match=r"model\.chat_template: writes 2 placeholder tokens"):
        rl_prompts(rows, DirectoryTokenizer.load(model, twice), 64, expanded=images.expanded)
    deaf = DirectoryTokenizer.load(model, CHAT_TEMPLATE.replace("\u2461\u2460\u2462", ""))
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: leaves out images; need one that"
    ):
        rl_prompts(rows, deaf, 64, expanded=images.expanded)


@pytest.mark.parametrize("model_type", VISION_PARTS)
@pytest.mark.parametrize("size", [(12, 6), (5, 13), (4, 4), (40, 3), (200, 90)])
def test_tokens_of_an_image_by_its_size_alone(
    tmp_path: Path, model_type: str, size: tuple[int, int]
) -> None:
    write_processor(write_vision_model(tmp_path, model_type))
    processor = ImageProcessor(tmp_path)
    patches, (t, h, w) = processor.patches(figure(1, *size))
    assert processor.num_tokens(*size) == len(patches) // 4 == t * h * w // 4


def test_a_model_that_cannot_see_is_named(tmp_path: Path, model: Path, dataset: Path) -> None:
    path = load_dataset(dataset).images_path
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        ConfigError, match=r"model\.path: .* is a text model; need one that sees im"
    ):
        prompt_images(tmp_path, path)
    assert prompt_images(tmp_path, tmp_path / "none.parquet") is None
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="has no configuration of an image processor"):
        prompt_images(model, path)


def test_what_samples_and_what_trains_see_one_image(
    run_round: Any, model: Path, dataset: Path
) -> None:
    first, second = run_round(
        "odd_length", prompts=(model, dataset), kl_coef=None, algorithm={"kl_loss_coef": 0.1}
    )
    assert all(math.isfinite(value) for value in (*first.values(), *second.values()))
    assert first["actor/grad_norm"] > 0
    assert first["mismatch/logprob_abs_mean"] < 1e-5
    assert second["mismatch/logprob_abs_mean"] < 1e-5
    assert second["training/policy_version"] == 2


def test_another_image_in_training_is_found(run_round: Any, model: Path, dataset: Path) -> None:
    def blind(images: PromptImages) -> None:
        seen = images.processor.of_sequences

        def other(files: Any) -> ImagePatches | None:
            found = seen(files)
            assert found is not None
            return ImagePatches(
                torch.zeros_like(found.pixel_values_PD), found.grid_thw_I3, found.num_images_B
            )

        images.processor.of_sequences = other  # type: ignore[method-assign]

    with pytest.raises(WeightSyncError, match="mismatch"):
        run_round("odd_length", prompts=(model, dataset), see=blind)


def test_images_are_read_when_their_prompt_is_sampled(
    run_round: Any, model: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = ImageFile.read
    monkeypatch.setattr(
        ImageFile, "read", lambda file, name: (read.append(name), plain(file, name))[1]
    )
    run_round("odd_length", prompts=(model, dataset), batch_size_prompts=2)
    assert 4 <= len(read) <= 8
