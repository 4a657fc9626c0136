"""Write and read the images of a data set: one parquet file, a row per SHA-256.

    images.parquet   sha256 string (hex), width int32, height int32, data binary

Promises: the bytes are the source's, undecoded. Equal images in equal order give an equal file. A
row group has one image or at most 1 MiB, which bounds the memory of reading and writing.
"""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from engines.data.read.rows import Image, RLRow, RowError
from infra.errors import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow's names of the accepted formats."""
MAX_PIXELS = 100_000_000
"""Larger images are refused; this many pixels take 300 MB decoded."""
_GROUP_BYTES = 2**20
_SCHEMA = pa.schema(
    [
        ("sha256", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("data", pa.binary()),
    ]
)


def image_size(data: bytes, name: str) -> tuple[int, int]:
    """Return an encoded image's width and height in pixels.

    Raises:
        RowError: it is not an image, has another format, or is too large.
    """
    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        raise RowError(
            f"{name} is {len(data)} bytes that are no image; need {', '.join(FORMATS)}"
        ) from None
    except Pillow.DecompressionBombError:
        width = height = MAX_PIXELS
    if width * height > MAX_PIXELS:
        raise RowError(f"{name} has more than {MAX_PIXELS} pixels; need a smaller image")
    return width, height


def check_images(row: RLRow) -> None:
    """Decode the images of a new row; `RowError` if one has no bytes or is not a whole image."""
    for place, image in enumerate(row.images):
        name = f"images[{place}]"
        if image.data is None:
            raise RowError(f"{name} is a digest; need the bytes of a file")
        image_size(image.data, name)
        try:
            with Pillow.open(io.BytesIO(image.data), formats=FORMATS) as picture:
                picture.load()
        except (OSError, ValueError, SyntaxError) as error:
            raise RowError(f"{name} ends early or is damaged ({error}); need all of it") from None


def keep_images(row: RLRow, folder: Path) -> RLRow:
    """Write a row's images to `folder`, a file per digest; return the row with digests only."""
    if not row.images:
        return row
    folder.mkdir(exist_ok=True)
    for image in row.images:
        file = folder / image.sha256
        if image.data is not None and not file.exists():
            file.write_bytes(image.data)
    return replace(
        row,
        prompt=tuple(
            replace(message, images=tuple(Image(image.sha256) for image in message.images))
            for message in row.prompt
        ),
    )


def write_images(path: Path, folder: Path, digests: Iterable[str]) -> int:
    """Write images from the folder of `keep_images` to a parquet file; return how many.

    Each is written once, in the order of `digests`. Without digests, no file is written.
    """
    unique = dict.fromkeys(digests)
    if not unique:
        return 0
    with pq.ParquetWriter(
        path,
        _SCHEMA,
        compression="none",
        use_dictionary=False,
        store_schema=False,
        write_statistics=False,  # they would take half of each reader's memory
    ) as writer:
        group: list[dict[str, Any]] = []
        num_bytes = 0
        for sha256 in unique:
            data = (folder / sha256).read_bytes()
            if group and num_bytes + len(data) > _GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(group, _SCHEMA))
                group, num_bytes = [], 0
            width, height = image_size(data, sha256)
            group.append({"sha256": sha256, "width": width, "height": height, "data": data})
            num_bytes += len(data)
        writer.write_table(pa.Table.from_pylist(group, _SCHEMA))
    return len(unique)


Place = tuple[int, int, int, int]
"""Width and height of an image in pixels, its row group, and its row within the group."""


@dataclass(frozen=True)
class ImageFile:
    """The images of a data set, read on access.

    `footer` is parsed once instead of for each image; None if there is no file.
    """

    path: Path
    places: dict[str, Place] = field(repr=False)
    footer: pq.FileMetaData | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def open(path: Path) -> "ImageFile":
        """Read the places of all images, none if no file exists; ConfigError for another file."""
        if not path.exists():
            return ImageFile(path, {})
        columns = ["sha256", "width", "height"]
        try:
            with pq.ParquetFile(path) as file:
                footer = file.metadata
                found = file.read(columns).select(columns).to_pylist()
        except (pa.ArrowInvalid, KeyError) as error:
            raise ConfigError(str(path), f"holds no images ({error})") from None
        numbers = [
            (group, row)
            for group in range(footer.num_row_groups)
            for row in range(footer.row_group(group).num_rows)
        ]
        places = {
            image["sha256"]: (image["width"], image["height"], *number)
            for image, number in zip(found, numbers, strict=True)
        }
        return ImageFile(path, places, footer)

    def size(self, sha256: str) -> tuple[int, int]:
        """Return an image's width and height in pixels; `ConfigError` if it is absent."""
        return self._place(sha256)[:2]

    def read(self, sha256: str) -> bytes:
        """Return an image's encoded bytes; `ConfigError` if it is absent or has another digest."""
        _, _, group, row = self._place(sha256)
        with pq.ParquetFile(self.path, metadata=self.footer) as file:
            data: bytes = file.read_row_group(group, ["data"])["data"][row].as_py()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError(
                str(self.path), f"image {sha256} is damaged (another sha256); copy the file again"
            )
        return data

    def _place(self, sha256: str) -> Place:
        try:
            return self.places[sha256]
        except KeyError:
            raise ConfigError(
                str(self.path), f"has no image {sha256}; make the data again"
            ) from None
