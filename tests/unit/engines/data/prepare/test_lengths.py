"""Prompts that show images, looked at for their length as the stages that sample count them."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vision_cases import picture, write_chat_model

from engines.config.data import DataConfig, SourceConfig
from engines.config.model import ModelConfig
from engines.data.prepare import dataset as prepare
from engines.data.prepare import stored_rows
from engines.data.prepare.dataset import DatasetSummary
from engines.data.read import row_files
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import rl_prompts
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.vision.processor import prompt_images
from engines.vision.sizes import PROCESSOR_FILES, image_sizes
from infra.errors import ConfigError

SHAPES = [(12, 6), (4, 4), (40, 3), (60, 50), (5, 13), (8, 8), (2, 30), (11, 11)]
"""Between 4 and 25 tokens each, of 4 by 4 pixels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stored_rows, row_files):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)


def rows() -> Iterator[dict[str, Any]]:
    """One that shows nothing, then one or two images each; no two texts are alike."""
    judged = {"style": "rule", "ground_truth": "3"}
    for number in range(len(SHAPES) + 1):
        shapes = SHAPES[max(number - 2, 0) : number] if number % 2 else SHAPES[number - 1 : number]
        images = [{"bytes": picture(number, *shape), "path": None} for shape in shapes]
        text = "<image>" * len(images) + "x=" + "1" * number
        prompt = [{"role": "user", "content": text}]
        yield {"prompt": prompt, "images": images, "reward_model": judged}


def write(path: Path, given: list[dict[str, Any]]) -> SourceConfig:
    schema = pa.Table.from_pylist([next(row for row in given if row["images"])]).schema
    pq.write_table(pa.Table.from_pylist(given, schema), path)
    return SourceConfig(path=str(path))


def build(
    place: Path, model: Path, data: DataConfig, *, sees: bool = True, template: str | None = None
) -> DatasetSummary:
    """As the preprocess stage does."""
    of_model = ModelConfig(path=str(model), max_length=64)
    tokenizer = DirectoryTokenizer.load(model, template)
    find_sizes = partial(image_sizes, model) if sees else None
    return prepare.build_dataset(data, of_model, 0, place, tokenizer, find_sizes=find_sizes)


def sampled_lengths(place: Path, model: Path, split: str) -> list[int]:
    """What the stage that samples counts."""
    found = load_dataset(place)
    images = prompt_images(model, found.images_path)
    of_split = list(found.rl_rows() if split == "rl" else found.evaluation_rows())
    expanded = images.expanded if images else None
    return list(rl_prompts(of_split, DirectoryTokenizer.load(model), expanded=expanded).lengths)


@pytest.mark.parametrize("split", ["rl", "evaluation"])
def test_what_is_dropped_is_what_sampling_would_find_too_long(
    tmp_path: Path, model: Path, split: str
) -> None:
    source = write(tmp_path / "t.parquet", list(rows()))
    data = DataConfig.model_validate({split: (source,), "on_overlong": "drop"})
    build(tmp_path / "all", model, data)
    lengths = sampled_lengths(tmp_path / "all", model, split)
    assert len(lengths) == 9
    assert len(set(lengths)) > 5
    for limit in sorted(set(lengths)):
        limited = data.model_copy(update={"max_prompt_length": limit})
        place = tmp_path / f"below-{limit}"
        summary = getattr(build(place, model, limited), split)
        kept = [length for length in lengths if length <= limit]
        assert sampled_lengths(place, model, split) == kept
        assert (summary.num_rows, summary.num_overlong) == (len(kept), 9 - len(kept))
        strict = limited.model_copy(update={"on_overlong": "error"})
        if len(kept) == 9:
            build(tmp_path / f"strict-{limit}", model, strict)
            continue
        with pytest.raises(ConfigError) as refused:
            build(tmp_path / f"strict-{limit}", model, strict)
        longest = max(range(9), key=lengths.__getitem__)
        assert str(refused.value) == (
            f"data.max_prompt_length: {9 - len(kept)} of 9 prompts exceed {limit} tokens (the "
            f"longest, row {longest}, has {lengths[longest]}); data.on_overlong is 'error'; raise "
            "the limit or set data.on_overlong=drop"
        )


def test_images_of_dropped_rows_are_left_out(tmp_path: Path, model: Path) -> None:
    source = write(tmp_path / "t.parquet", list(rows()))
    data = DataConfig(rl=(source,), on_overlong="drop", max_prompt_length=3)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length: 0 of 9 prompts have at most"):
        build(tmp_path / "none", model, data)
    data = data.model_copy(update={"max_prompt_length": 4})
    assert build(tmp_path / "out", model, data).num_images is None


def test_unknown_model_defers_image_prompt_lengths_to_sampling(tmp_path: Path, model: Path) -> None:
    source = write(tmp_path / "t.parquet", list(rows()))
    data = DataConfig(rl=(source,), max_prompt_length=5)
    summary = build(tmp_path / "out", model, data, sees=False, template="{{ 'x=' }}")
    assert (summary.rl.num_rows, summary.rl.num_overlong) == (9, 0)


def test_the_processor_matters_to_images_alone(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    for name in PROCESSOR_FILES:
        (broken / name).unlink(missing_ok=True)
    (broken / PROCESSOR_FILES[0]).write_text('{"size": {"height": 3}}')
    given = list(rows())
    texts = [{**row, "images": None} for row in given if not row["images"]]
    source = write(tmp_path / "t.parquet", given)
    pq.write_table(pa.Table.from_pylist(texts, pq.read_schema(source.path)), tmp_path / "x.parquet")
    text = SourceConfig(path=str(tmp_path / "x.parquet"))
    assert build(tmp_path / "text", broken, DataConfig(rl=(text,))).rl.num_rows == len(texts) == 1
    with pytest.raises(ConfigError, match=r"model\.path: .* its image processor has min_pixels"):
        build(tmp_path / "images", broken, DataConfig(rl=(source,)))


@pytest.mark.parametrize("split", ["rl", "evaluation"])
def test_a_shape_that_the_model_does_not_take(tmp_path: Path, model: Path, split: str) -> None:
    given = list(rows())
    given[4]["images"][0]["bytes"] = picture(0, 2, 500)
    source = write(tmp_path / "t.parquet", given)
    data = DataConfig.model_validate({split: (source,), "on_overlong": "drop"})
    with pytest.raises(ConfigError) as refused:
        build(tmp_path / "out", model, data)
    assert str(refused.value) == (
        f"data.{split}: row 4 of the split: an image of 2 x 500 pixels is too long for this model; "
        "need sides of at most 200 to 1; leave out such rows"
    )


def test_a_template_that_writes_no_placeholder(tmp_path: Path, model: Path) -> None:
    source = write(tmp_path / "t.parquet", list(rows()))
    template = "{% for m in messages %}x{% endfor %}"
    with pytest.raises(ConfigError, match=r"model\.chat_template: leaves out images; need one"):
        build(tmp_path / "out", model, DataConfig(rl=(source,)), template=template)
