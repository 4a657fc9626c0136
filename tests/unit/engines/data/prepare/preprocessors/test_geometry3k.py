"""Geometry3k as its parquet files are: images in the table, a mark in the text, an answer."""

import base64
import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import loaded_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from engines.config.data import DataConfig, DecontaminationConfig, SourceConfig
from engines.config.model import ModelConfig, TokenizerConfig
from engines.data.image_store import ImageFile
from engines.data.prepare import readers
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.dataset import load_dataset
from engines.data.read.rows import Image, Message
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
    ]
)
"""Of hiyouga/geometry3k: a sequence of `datasets.Image`, and two strings."""


def figure(seed: int) -> bytes:
    """A PNG of noise, a few kB."""
    pixels = random.Random(seed).randbytes(40 * 30 * 3)
    buffer = io.BytesIO()
    Pillow.frombytes("RGB", (40, 30), pixels).save(buffer, "PNG")
    return buffer.getvalue()


def geometry(seed: int, problem: str = "<image>Find $x$.", answer: str = "3") -> dict[str, Any]:
    return {
        "images": [{"bytes": figure(seed), "path": None}],
        "problem": problem,
        "answer": answer,
    }


def write(path: Path, *rows: dict[str, Any]) -> SourceConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path)
    return SourceConfig(path=str(path))


def test_a_row_of_the_original_table(tmp_path: Path) -> None:
    two = geometry(1, "<image> and <image>: which angle?", "\\frac{1}{2}")
    two["images"].append({"bytes": figure(2), "path": "a.png"})
    source = write(tmp_path / "data" / "train-00000-of-00001.parquet", geometry(0), two)
    loaded = loaded_rows.load("rl", source)
    assert loaded.reports[0].format == "geometry3k"
    first, second = loaded.rows
    assert first.prompt == (
        Message("user", f"<image>Find $x$.\n{INSTRUCTION}", images=(Image.of(figure(0)),)),
    )
    assert first.reward_model.ground_truth == "3"
    assert first.data_source == "hiyouga/geometry3k"
    assert second.images == (Image.of(figure(1)), Image.of(figure(2)))


def test_artifact_stores_each_used_image_once_and_no_other(tmp_path: Path) -> None:
    rows = [geometry(i % 3, f"<image>Find {i}.") for i in range(9)]
    train = write(tmp_path / "train.parquet", *rows).model_copy(update={"limit": 5})
    held_out = write(tmp_path / "test.parquet", geometry(7), geometry(0))
    data = DataConfig(rl=(train,), evaluation=(held_out,))
    for name in ("a", "b"):
        summary = build_dataset(data, None, 3, tmp_path / name)
    dataset = load_dataset(tmp_path / "a")
    shown = [image.sha256 for row in dataset.rl_rows() for image in row.images]
    shown += [image.sha256 for row in dataset.evaluation_rows() for image in row.images]
    images = ImageFile.open(dataset.images_path)
    assert set(shown) == set(images.places)
    assert summary.num_images == len(set(shown)) >= 3
    originals = {hashlib.sha256(figure(i)).hexdigest(): figure(i) for i in (0, 1, 2, 7)}
    assert {name: images.read(name) for name in images.places}.items() <= originals.items()
    assert all(images.size(name) == (40, 30) for name in images.places)
    assert dataset.summary()["num_images"] == summary.num_images
    for file in ("rl.parquet", "eval.parquet", "images.parquet", "summary.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert not list(tmp_path.glob("rows-*"))


def test_a_data_set_without_the_images_that_it_counts_is_named(tmp_path: Path) -> None:
    """Its rows would else be refused as showing images to a stage that reads none."""
    build_dataset(DataConfig(rl=(write(tmp_path / "t.parquet", geometry(0)),)), None, 0, tmp_path)
    (tmp_path / "images.parquet").unlink()
    with pytest.raises(ConfigError) as found:
        _ = load_dataset(tmp_path).images_path
    assert str(found.value) == (
        f"dataset: {tmp_path} has no images.parquet, though its summary.json counts 1 images; need "
        "all files of the data set; copy it again"
    )


def test_one_text_with_other_images_is_another_problem(tmp_path: Path) -> None:
    train = [geometry(i) for i in range(9)]
    held_out = [geometry(i) for i in range(9, 18)]
    data = DataConfig(
        rl=(write(tmp_path / "train.parquet", *train),),
        evaluation=(write(tmp_path / "test.parquet", *held_out),),
        decontamination=DecontaminationConfig(),
    )
    summary = build_dataset(data, None, 0, tmp_path / "out")
    assert summary.rl.num_rows == summary.rl.num_distinct_prompts == 9
    assert summary.num_decontaminated == {"sft": 0, "rl": 0, "preference": 0}
    data = data.model_copy(
        update={"evaluation": (write(tmp_path / "test.parquet", *held_out, geometry(2)),)}
    )
    assert build_dataset(data, None, 0, tmp_path / "same").rl.num_rows == 8


def test_verls_rows_with_images(tmp_path: Path) -> None:
    """As its preprocessing of Geometry3k writes them."""
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. You FIRST think."}],
        "images": [{"bytes": figure(1), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (read,) = loaded_rows.load("rl", SourceConfig(path=str(tmp_path / "t.parquet"))).rows
    assert read.prompt[0].images == (Image.of(figure(1)),)


def test_rows_with_images_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BATCH_BYTES", 20_000)
    source = write(tmp_path / "t.parquet", *(geometry(i) for i in range(20)))
    sizes: list[int] = []
    opened = readers.open_parquet

    def spied(path: Path) -> Any:
        file = opened(path)
        batches = file.iter_batches

        def iter_batches(num_rows: int, **which: Any) -> Any:
            sizes.append(num_rows)
            return batches(num_rows, **which)

        monkeypatch.setattr(file, "iter_batches", iter_batches)
        return file

    monkeypatch.setattr(readers, "open_parquet", spied)
    assert len(loaded_rows.load("rl", source).rows) == 20
    assert {size * len(figure(0)) // 20_000 for size in sizes} <= {0, 1}
    assert all(1 <= size < 20 for size in sizes)


def test_rows_of_text_beside_images_are_as_long_as_they_may_be(tmp_path: Path) -> None:
    """With the tokenizer of a model, as the preprocess stage of a pretrained one has it."""
    train_tokenizer(TokenizerConfig(), ["abcdefgh"], tmp_path / "tokenizer", max_length=64)
    tokenizer = DirectoryTokenizer.load(tmp_path / "tokenizer")
    model = ModelConfig(init="pretrained", path="a/b", max_length=64)
    judged = {"style": "rule", "ground_truth": "3"}
    rows = [
        {"prompt": [{"role": "user", "content": text}], "images": images, "reward_model": judged}
        for text, images in (
            ("a" * 30, None),
            ("<image>" + "a" * 30, geometry(1)["images"]),
            ("a", None),
        )
    ]
    table = pa.Table.from_pylist(rows[1:2]).schema
    pq.write_table(pa.Table.from_pylist(rows, table), tmp_path / "t.parquet")
    data = DataConfig(
        rl=(SourceConfig(path=str(tmp_path / "t.parquet")),),
        max_prompt_length=20,
        on_overlong="drop",
    )
    summary = build_dataset(data, model, 0, tmp_path / "out", tokenizer)
    assert (summary.rl.num_rows, summary.rl.num_overlong, summary.num_images) == (2, 1, 1)
    kept = load_dataset(tmp_path / "out").rl_rows()
    assert [len(row.images) for row in kept] == [1, 0]
    strict = data.model_copy(update={"on_overlong": "error"})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length: 1 of 3 prompts exceed 20"):
        build_dataset(strict, model, 0, tmp_path / "other", tokenizer)


def test_a_model_made_from_scratch_is_refused(tmp_path: Path) -> None:
    data = DataConfig(rl=(write(tmp_path / "t.parquet", geometry(0)),))
    with pytest.raises(ConfigError, match=r"model\.init: got random; rows of data\.rl show images"):
        build_dataset(data, ModelConfig(init="random"), 0, tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"images": []}, "images is empty; need an image"),
        ({"images": None}, "images is empty; need an image"),
        ({"problem": "Find x."}, "1 images are given for 0 <image>; need one each"),
        ({"problem": "<image><image>"}, "1 images are given for 2 <image>; need one each"),
        (
            {"images": [{"bytes": None, "path": "a.png"}]},
            "images[0].bytes is null; need the bytes of a file, embedded in the table",
        ),
        (
            {"images": [{"bytes": b"GIF89a", "path": None}]},
            "images[0] is 6 bytes that are no image",
        ),
        ({"answer": ""}, "answer is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    source = write(tmp_path / "t.parquet", geometry(0), {**geometry(1), **changed})
    with pytest.raises(ConfigError) as error:
        loaded_rows.load("rl", source)
    assert str(error.value).startswith(f"t.parquet row 1: {problem}")


def test_supervised_rows_and_pairs_show_none(tmp_path: Path) -> None:
    question = {"role": "user", "content": "<image>?"}
    images = [{"bytes": figure(0), "path": None}]
    answers = [{"role": "assistant", "content": text} for text in "ab"]
    layouts = {"sft": "messages", "preference": "pairs"}
    rows = {
        "sft": {"messages": [question, answers[0]], "images": images},
        "preference": {
            "prompt": [question],
            "chosen": answers[:1],
            "rejected": answers[1:],
            "images": images,
        },
    }
    for split, row in rows.items():
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
        source = SourceConfig(path=str(tmp_path / "t.parquet"), format=layouts[split])
        with pytest.raises(ConfigError, match=r"t\.parquet row 0: images are given; need text; "):
            loaded_rows.load(split, source)


def test_paths_and_text_are_no_images(tmp_path: Path) -> None:
    for image in ("a.png", base64.b64encode(figure(0)).decode()):
        row = {**geometry(0), "images": [image]}
        (tmp_path / "t.jsonl").write_text(json.dumps(row), encoding="utf-8")
        source = SourceConfig(path=str(tmp_path / "t.jsonl"), format="geometry3k")
        with pytest.raises(ConfigError, match=r"images\[0\] is a str; need the bytes of a file"):
            loaded_rows.load("rl", source)
