"""Followers of a stage; that they join, leave and die is in the contract of a store."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.store.storage import LocalStorage

FINGERPRINT = "f" * 64


def test_who_leaves_beside_another_still_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = LocalStorage(tmp_path).attempts, LocalStorage(tmp_path).attempts
    mine.join(FINGERPRINT, "me")
    theirs.join(FINGERPRINT, "they")
    walk = os.walk

    def with_one_that_just_left(*args: Any, **options: Any) -> Iterator[Any]:
        for directory, directories, names in walk(*args, **options):
            yield directory, directories, ["another", *names]

    monkeypatch.setattr(os, "walk", with_one_that_just_left)
    assert mine.leave(FINGERPRINT, "me") == 1
    assert mine.followed_by("me") == []
    assert theirs.leave("e" * 64, "they") == 0
