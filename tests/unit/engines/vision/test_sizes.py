"""Tokens of an image by its size, against transformers' own processor of the same directory."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.data.read.rows import RowError
from engines.vision.sizes import PROCESSOR_FILES, ImageSizes, image_sizes
from infra.errors import ConfigError

OLDER, NEWER = PROCESSOR_FILES
QWEN2_5_VL = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2,
}  # fmt: skip
SAVED_TWICE = {"size": {"min_pixels": 3136, "max_pixels": 12845056}, **QWEN2_5_VL}
"""As transformers 4.49 wrote it."""

side = st.integers(1, 3000) | st.integers(1, 100_000)
pixels = st.integers(1, 2_000_000)
bound = pixels | st.none()
bounds = st.fixed_dictionaries({}, optional={"min_pixels": bound, "max_pixels": bound})
size = st.fixed_dictionaries({"shortest_edge": pixels, "longest_edge": pixels}) | st.none()
parts = st.fixed_dictionaries(
    {},
    optional={
        "patch_size": st.integers(1, 32),
        "merge_size": st.integers(1, 4),
        "size": size,
    },
)
configs = st.builds(lambda one, other: {**one, **other}, parts, bounds)


def model(path: Path, **files: Any) -> Path:
    """A directory with as much of a model as is read here."""
    config = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def ours(path: Path) -> ImageSizes:
    found = image_sizes(path)
    assert found is not None
    return found


def theirs(path: Path, width: int, height: int) -> int | None:
    """Of transformers; None where it takes no such shape."""
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path)
    try:
        num_patches = processor.get_number_of_image_patches(height, width)
    except ValueError as error:
        if "aspect ratio" in str(error):
            return None
        raise
    assert num_patches % processor.merge_size**2 == 0
    return num_patches // processor.merge_size**2


@settings(deadline=None, max_examples=300)
@given(config=configs, width=side, height=side, nested=st.booleans())
@example(QWEN2_5_VL, 640, 480, False)
@example(QWEN3_VL, 640, 480, False)
@example(SAVED_TWICE, 9000, 9000, False)
@example({}, 1, 1, False)
@example({}, 42, 14, False)  # 1.5 and 0.5 tokens: to the even one
@example({}, 10_000, 50, True)
@example(QWEN2_5_VL, 100_000, 500, False)
def test_as_transformers_counts(
    config: dict[str, Any], width: int, height: int, nested: bool
) -> None:
    with TemporaryDirectory() as place:
        name = NEWER if nested else OLDER
        content = {"image_processor": config} if nested else config
        path = model(Path(place), **{name.removesuffix(".json"): content})
        expected = theirs(path, width, height)
        if expected is None:
            with pytest.raises(
                RowError, match=f"an image of {width} x {height} pixels is too long"
            ):
                ours(path).num_tokens(width, height)
        else:
            assert ours(path).num_tokens(width, height) == expected


def test_hand_numbers() -> None:
    sizes = ImageSizes(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=1003520)
    assert sizes.num_tokens(280, 140) == 10 * 5
    assert sizes.num_tokens(28, 28) == 2 * 2  # enlarged to 56 x 56
    # 2800 x 2800 become sqrt(1003520) = 1001.76 pixels a side, of which 35 x 28 = 980 are taken.
    assert sizes.num_tokens(2800, 2800) == 35 * 35
    for width, height in ((2010, 10), (10, 2010), (1, 201)):
        with pytest.raises(RowError) as refused:
            sizes.num_tokens(width, height)
        assert str(refused.value) == (
            f"an image of {width} x {height} pixels is too long for this model; need sides of at "
            "most 200 to 1; leave out such rows"
        )
    # 20,000 pixels, but no whole row of tokens: sqrt(3136 / 20000) = 0.396 of 71.4 are 28.3 wide.
    assert sizes.num_tokens(2000, 10) == 29


def test_which_of_two_files_is_read(tmp_path: Path) -> None:
    both = {"preprocessor_config": {"patch_size": 7}, "processor_config": {"processor_class": "a"}}
    assert ours(model(tmp_path, **both)).patch_size == 7
    assert theirs(tmp_path, 500, 300) == ours(tmp_path).num_tokens(500, 300)
    both["processor_config"] = {"image_processor": {"patch_size": 9}}
    assert ours(model(tmp_path, **both)).patch_size == 9
    assert theirs(tmp_path, 500, 300) == ours(tmp_path).num_tokens(500, 300)


def test_models_of_which_nothing_is_known(tmp_path: Path) -> None:
    assert image_sizes(model(tmp_path)) is None
    assert image_sizes(model(tmp_path, processor_config={"processor_class": "a"})) is None
    assert image_sizes(model(tmp_path, preprocessor_config={})) == ImageSizes(14, 2, 3136, 1003520)
    for config in (
        {"model_type": "qwen3"},
        {"model_type": "gemma3", "vision_config": {"depth": 1}},
    ):
        assert image_sizes(model(tmp_path, preprocessor_config={}, config=config)) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"size": {"shortest_edge": 3136}}, "max_pixels None"),
        ({"size": {"height": 10, "width": 10}}, "min_pixels None"),
        ({"size": SAVED_TWICE["size"]}, "min_pixels None"),
        ({"size": 224}, "min_pixels None"),
        ({"patch_size": 0}, "patch_size 0"),
        ({"patch_size": None}, "patch_size None"),
        ({"merge_size": "2"}, "merge_size 2"),
        ({"max_pixels": 0.5}, "max_pixels 0.5"),
    ],
)
def test_a_processor_that_says_no_size(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    path = model(tmp_path, preprocessor_config=config)
    with pytest.raises(ConfigError) as refused:
        image_sizes(path)
    assert str(refused.value) == (
        f"model.path: {path}: its image processor has {named}; need a whole number from 1; set "
        "size to shortest_edge and longest_edge, or copy its configuration again"
    )


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = model(tmp_path, preprocessor_config=[1])
    with pytest.raises(ConfigError, match=r"model\.path: .* holds a list; need an object"):
        image_sizes(path)
    (path / OLDER).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path: .* is not JSON"):
        image_sizes(path)
