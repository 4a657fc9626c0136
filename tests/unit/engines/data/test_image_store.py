"""Images by their content: what is written is read, in bounded groups; what is none is refused."""

import hashlib
import io
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from engines.data import image_store
from engines.data.image_store import (
    ImageFile,
    check_images,
    image_size,
    keep_images,
    write_images,
)
from engines.data.read.rows import Image, Message, RewardModel, RLRow, RowError
from infra.errors import ConfigError


def encoded(width: int, height: int, colour: int, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height), (colour, 2 * colour, 7)).save(buffer, format)
    return buffer.getvalue()


def row(*images: Image) -> RLRow:
    text = "<image>" * len(images) + "What is it?"
    prompt = (Message("user", text, images=images),)
    return RLRow("d", prompt, "", RewardModel("rule", "1"))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_size_by_the_header(format: str) -> None:
    assert image_size(encoded(31, 17, 5, format), "x") == (31, 17)


def test_what_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"", b"PNG", encoded(3, 3, 1)[:20], encoded(3, 3, 1, "BMP")):
        with pytest.raises(RowError, match=r"^x is \d+ bytes that are no image; need PNG, JPEG"):
            image_size(data, "x")
    monkeypatch.setattr(image_store, "MAX_PIXELS", 100)
    assert image_size(encoded(10, 10, 1), "x") == (10, 10)
    with pytest.raises(RowError, match="x has more than 100 pixels; need a smaller image"):
        image_size(encoded(10, 11, 1), "x")


def test_a_row_keeps_digests_and_the_folder_the_bytes(tmp_path: Path) -> None:
    first, second = Image.of(encoded(4, 5, 1)), Image.of(encoded(5, 4, 2))
    folder = tmp_path / "images"
    given = row(first, second, first)
    kept = keep_images(given, folder)
    assert kept == given
    assert [image.data for image in kept.images] == [None] * 3
    assert {path.name for path in folder.iterdir()} == {first.sha256, second.sha256}
    assert first.data is not None
    assert (folder / first.sha256).read_bytes() == first.data
    check_images(given)
    with pytest.raises(RowError, match=r"images\[0\] is a digest; need the bytes"):
        check_images(kept)


def test_images_round_trip_and_a_read_loads_one_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_store, "_GROUP_BYTES", 250)
    folder = tmp_path / "images"
    images = [encoded(8 + i, 9, i) for i in range(7)]
    names = [hashlib.sha256(data).hexdigest() for data in images]
    folder.mkdir()
    for name, data in zip(names, images, strict=True):
        (folder / name).write_bytes(data)
    for path in (tmp_path / "a.parquet", tmp_path / "b.parquet"):
        assert write_images(path, folder, [*names, *names[::-1]]) == 7
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert metadata.num_row_groups > 2
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert max(group.num_rows for group in groups) <= 3
    file = ImageFile.open(tmp_path / "a.parquet")
    for i, name in enumerate(names):
        assert file.read(name) == images[i]
        assert file.size(name) == (8 + i, 9)
    with pytest.raises(ConfigError, match=r"a\.parquet: has no image abc; make the data again"):
        file.read("abc")


def test_the_footer_is_parsed_once_and_not_for_each_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with the images: reading each would cost as much as reading all."""
    monkeypatch.setattr(image_store, "_GROUP_BYTES", 1)
    folder, images = tmp_path / "images", [encoded(8 + i, 9, i) for i in range(9)]
    names = [hashlib.sha256(data).hexdigest() for data in images]
    folder.mkdir()
    for name, data in zip(names, images, strict=True):
        (folder / name).write_bytes(data)
    write_images(tmp_path / "a.parquet", folder, names)
    file = pickle.loads(pickle.dumps(ImageFile.open(tmp_path / "a.parquet")))
    opened, parsed = pq.ParquetFile, list[bool]()

    def spied(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        parsed.append(metadata is None)
        return opened(path, metadata=metadata)

    monkeypatch.setattr(image_store.pq, "ParquetFile", spied)
    assert [file.read(name) for name in names] == images
    assert parsed == [False] * len(names)


def test_no_images_no_file(tmp_path: Path) -> None:
    assert write_images(tmp_path / "a.parquet", tmp_path / "no", ()) == 0
    assert not (tmp_path / "a.parquet").exists()
    assert ImageFile.open(tmp_path / "a.parquet").places == {}


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    data = encoded(4, 4, 3)
    name = hashlib.sha256(data).hexdigest()
    folder.mkdir()
    (folder / name).write_bytes(data)
    write_images(tmp_path / "a.parquet", folder, [name])
    table = pq.read_table(tmp_path / "a.parquet")
    changed = table.set_column(3, "data", pa.array([encoded(4, 4, 4)], pa.binary()))
    pq.write_table(changed, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=f"image {name} is damaged"):
        ImageFile.open(tmp_path / "a.parquet").read(name)
    pq.write_table(table.select(["width"]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="holds no images"):
        ImageFile.open(tmp_path / "a.parquet")
