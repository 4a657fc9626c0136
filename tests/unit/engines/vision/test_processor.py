"""Images as a model takes them, against transformers' own processor of text and images."""

import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_cases import (
    CHAT_TEMPLATE,
    END,
    IMAGE,
    START,
    VIDEO,
    VISION_PARTS,
    picture,
    write_chat_model,
    write_geometry,
    write_processor,
    write_vision_model,
)

from engines.data.image_store import write_images
from engines.data.read.chat import render_prompts
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import rl_prompts
from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.rows import IMAGE_MARK, Image, Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.vision.processor import ImageProcessor, prompt_images
from infra.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_geometry(tmp_path / "dataset")


@pytest.fixture
def rows(tmp_path: Path, dataset: Path) -> Iterator[MappedRows[RLRow]]:
    with closing(MappedRows(load_dataset(dataset).rl_rows(), tmp_path)) as rows:
        yield rows


def whole_processor(model: Path) -> Any:
    """Of transformers; made without its part for videos, which needs another library."""
    made: Any = object.__new__(Qwen2_5_VLProcessor)
    made.image_processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    made.tokenizer, made.video_processor = AutoTokenizer.from_pretrained(model), None
    made.image_token, made.video_token = made.tokenizer.convert_ids_to_tokens([IMAGE, VIDEO])
    made.image_token_id, made.video_token_id = IMAGE, VIDEO
    made.image_ids, made.video_ids = [IMAGE], [VIDEO]
    made.chat_template = CHAT_TEMPLATE
    return made


def test_prompts_and_patches_are_those_of_transformers(
    model: Path, dataset: Path, rows: MappedRows[RLRow]
) -> None:
    data, theirs = load_dataset(dataset), whole_processor(model)
    images = prompt_images(model, data.images_path)
    assert images is not None
    prompts = rl_prompts(rows, DirectoryTokenizer.load(model), expanded=images.expanded)
    for prompt, row in zip(prompts, rows, strict=True):
        files = images.encoded(row)
        pictures = iter([Pillow.open(io.BytesIO(data)) for data in files])
        first, *texts = row.prompt[0].content.split(IMAGE_MARK)
        assert first == ""
        content: list[dict[str, Any]] = []
        for text in texts:
            content.append({"type": "image", "image": next(pictures)})
            content += [{"type": "text", "text": text}] if text else []
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="pt",
        )
        assert list(prompt.prompt_ids) == expected["input_ids"][0].tolist()
        patches = images.processor.of_sequences([files])
        assert patches is not None
        assert torch.equal(patches.pixel_values_PD, expected["pixel_values"])
        assert torch.equal(patches.grid_thw_I3, expected["image_grid_thw"])


def test_prompts_make_room_for_their_images(
    model: Path, dataset: Path, rows: MappedRows[RLRow]
) -> None:
    tokenizer = DirectoryTokenizer.load(model)
    assert tokenizer.encode("\u2460\u2461\u2462", add_special_tokens=False) == [IMAGE, START, END]
    data = load_dataset(dataset)
    images = prompt_images(model, data.images_path)
    assert images is not None
    prompts = rl_prompts(rows, tokenizer, expanded=images.expanded)
    assert prompts.num_with_images == len(rows)
    assert prompts[1] == list(prompts)[1]
    plain = render_prompts(tokenizer, [row.prompt for row in rows])
    for prompt, short, row in zip(prompts, plain, rows, strict=True):
        assert short.count(IMAGE) == len(row.images)
        patches = images.processor.of_sequences([images.encoded(row)])
        assert patches is not None
        assert prompt.prompt_ids.count(IMAGE) == len(patches.pixel_values_PD) // 4
        assert [i for i in prompt.prompt_ids if i != IMAGE] == [i for i in short if i != IMAGE]
    with pytest.raises(ConfigError, match="data: row 0 of .* shows images, which this stage"):
        rl_prompts(rows, tokenizer)
    twice = CHAT_TEMPLATE.replace("\u2460", "\u2460\u2460")
    with pytest.raises(
        ConfigError,
        match=r"data: row 0 of .*: the prompt has 2 placeholder tokens \(30\) for 1 images",
    ):
        rl_prompts(rows, DirectoryTokenizer.load(model, twice), expanded=images.expanded)
    deaf = DirectoryTokenizer.load(model, CHAT_TEMPLATE.replace("\u2461\u2460\u2462", ""))
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: leaves out images; need one that"
    ):
        rl_prompts(rows, deaf, expanded=images.expanded)


def question(text: str) -> RLRow:
    return RLRow("s", (Message("user", text),), "", RewardModel("rule", "2"))


def test_placeholder_in_text_is_refused_beside_rows_with_images(
    model: Path, dataset: Path, rows: MappedRows[RLRow]
) -> None:
    """Alone it would end the round in the engine, which has no image for it."""
    images = prompt_images(model, load_dataset(dataset).images_path)
    assert images is not None
    given = [*rows, question("1+1"), question("1\u2460+1")]
    with pytest.raises(ConfigError) as refused:
        rl_prompts(given, DirectoryTokenizer.load(model), expanded=images.expanded)
    said = str(refused.value)
    assert said.startswith(f"data: row {len(rows) + 1} of the stage's split (data_source ")
    assert f"the prompt has 1 placeholder tokens ({IMAGE}) for 0 images; need one each" in said


def test_an_image_of_a_shape_that_the_processor_refuses_is_named(
    model: Path, tmp_path: Path
) -> None:
    data, folder = picture(1, 2, 500), tmp_path / "images"
    shown = Image.of(data)
    folder.mkdir()
    (folder / shown.sha256).write_bytes(data)
    write_images(tmp_path / "images.parquet", folder, [shown.sha256])
    images = prompt_images(model, tmp_path / "images.parquet")
    assert images is not None
    row = question("<image>")
    row = replace(row, prompt=(replace(row.prompt[0], images=(shown,)),))
    with pytest.raises(ConfigError, match=r"data: row 0 of .*: an image of 2 x 500 pixels"):
        rl_prompts([row], DirectoryTokenizer.load(model), expanded=images.expanded)


def test_samples_of_one_prompt_share_its_images(model: Path) -> None:
    files = [picture(1), picture(2, 5, 13)]
    processor = ImageProcessor(model)
    one, eight = processor.of_sequences([files]), processor.of_sequences([files] * 8)
    assert one is not None
    assert eight is not None
    assert sum(each.nbytes for each in eight.patches) == one.pixel_values_PD.nbytes
    assert torch.equal(eight.pixel_values_PD, one.pixel_values_PD.repeat(8, 1))


def test_patches_are_made_of_three_formats_alone(model: Path) -> None:
    buffer = io.BytesIO()
    Pillow.new("RGB", (8, 8)).save(buffer, "BMP")
    with pytest.raises(UnidentifiedImageError):
        ImageProcessor(model).patches(buffer.getvalue())


@pytest.mark.parametrize("model_type", VISION_PARTS)
@pytest.mark.parametrize("size", [(12, 6), (5, 13), (4, 4), (40, 3), (200, 90)])
def test_tokens_of_an_image_by_its_size_alone(
    tmp_path: Path, model_type: str, size: tuple[int, int]
) -> None:
    write_processor(write_vision_model(tmp_path, model_type))
    processor = ImageProcessor(tmp_path)
    patches, (t, h, w) = processor.patches(picture(1, *size))
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
