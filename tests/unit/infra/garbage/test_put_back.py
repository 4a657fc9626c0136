"""A thing that is needed after all goes back to its place, or an error says that it could not."""

import errno
from pathlib import Path

import pytest

from infra.store.inventory import LocalInventory


def test_a_needed_thing_that_cannot_go_back_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "stages" / ("a" * 64)
    place.mkdir(parents=True)
    (place / "0").write_text("held")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target == place:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    inventory = LocalInventory(tmp_path)
    with pytest.raises(OSError, match=r"Input/output error: .* is needed; rename it to a{64} "):
        inventory.remove_unless(f"stages/{place.name}", lambda _: True)
    (hidden,) = tmp_path.glob("stages/.*")
    assert (hidden / "0").read_text() == "held"


def test_of_a_needed_thing_and_its_newer_one_the_newer_stays(tmp_path: Path) -> None:
    place = tmp_path / "stages" / ("a" * 64)
    place.mkdir(parents=True)
    (place / "0").write_text("old")

    def is_needed(_: float) -> bool:
        place.mkdir()
        (place / "0").write_text("new")
        return True

    assert LocalInventory(tmp_path).remove_unless(f"stages/{place.name}", is_needed)
    assert (place / "0").read_text() == "new"
    assert list(tmp_path.glob("stages/.*")) == []
