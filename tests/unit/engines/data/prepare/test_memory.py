"""The memory of preprocessing: bounded by batches, not by rows."""

import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peak_memory import peak_bytes
from PIL import Image

NUM_ROWS = 70_000
"""More than a row group has, so that one is always full."""
MAX_GROWTH_BYTES = 400 * NUM_ROWS
"""A row is read one and a half times and is some kilobytes as objects, its token ids among them."""
PROGRAM = """
import sys
from pathlib import Path
from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.data.prepare.dataset import build_dataset

source = {"path": sys.argv[1]}
data = DataConfig.model_validate({"rl": [source, {**source, "limit": int(sys.argv[3])}]})
build_dataset(data, ModelConfig(init="random", max_length=128), 0, Path(sys.argv[2]))
"""

IMAGE_BYTES = 300 * 500
NUM_IMAGES = 1_500
"""225 MB, of which 64 MiB are read at a time; enough for all that the allocator keeps."""
OF_IMAGES = """
import sys
from pathlib import Path
from engines.config.data import DataConfig
from engines.data.prepare.dataset import build_dataset

data = DataConfig.model_validate({"rl": [{"path": sys.argv[1], "format": "geometry3k"}]})
build_dataset(data, None, 0, Path(sys.argv[2]))
"""


def peak_of_images(directory: Path, num_images: int) -> int:
    """Of a process that makes a data set of so many images, each another; in bytes."""
    images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    texts = [("problem", pa.string()), ("answer", pa.string())]
    schema = pa.schema([("images", images), *texts])
    source, draw = directory / f"{num_images}.parquet", random.Random(num_images)
    with pq.ParquetWriter(source, schema) as writer:
        for first in range(0, num_images, 100):
            rows = []
            for number in range(first, first + 100):
                file = io.BytesIO()
                picture = Image.frombytes("L", (300, 500), draw.randbytes(IMAGE_BYTES))
                picture.save(file, "PNG", compress_level=0)
                image = {"bytes": file.getvalue(), "path": None}
                rows.append({"images": [image], "problem": f"<image>{number}", "answer": "1"})
            writer.write_table(pa.Table.from_pylist(rows, schema))
    arguments = [str(source), str(directory / f"out-{num_images}")]
    return peak_bytes(["-c", OF_IMAGES, *arguments], deadline_s=300.0)


@pytest.mark.slow
def test_twice_the_images_need_no_more_memory(tmp_path: Path) -> None:
    once, twice = (peak_of_images(tmp_path, number) for number in (NUM_IMAGES, 2 * NUM_IMAGES))
    assert twice - once < NUM_IMAGES * IMAGE_BYTES / 2


def peak_of(directory: Path, num_rows: int) -> int:
    """Of a process that reads so many rows and a sample of them, and tokenizes all; in bytes."""
    source = directory / f"{num_rows}.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            prompt = f"{number} {'twice as many clips ' * 4}"
            row = {"prompt": prompt, "reward_model": {"ground_truth": str(number)}}
            file.write(f"{json.dumps(row)}\n")
    arguments = [str(source), str(directory / f"out-{num_rows}"), str(num_rows // 2)]
    return peak_bytes(["-c", PROGRAM, *arguments], deadline_s=300.0)


@pytest.mark.slow
def test_twice_the_rows_need_no_more_memory(tmp_path: Path) -> None:
    once, twice = (peak_of(tmp_path, num_rows) for num_rows in (NUM_ROWS, 2 * NUM_ROWS))
    assert twice - once < MAX_GROWTH_BYTES
