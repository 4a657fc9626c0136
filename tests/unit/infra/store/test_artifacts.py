import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError, ConfigError
from infra.store.artifacts import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    build_manifest,
    external_artifact,
    read_manifest,
    verify_directory,
    write_manifest,
)

HELLO = (
    "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # printf hello | sha256sum
)
PART = st.text("abcXYZ09._- ", min_size=1, max_size=6).filter(lambda s: s.strip(".") == s)
TREES = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join), st.binary(max_size=64), min_size=1
).filter(
    lambda tree: (
        MANIFEST_NAME not in tree
        # no name may be both a file and a directory
        and not any(other.startswith(name + "/") for name in tree for other in tree)
    )
)


def write_tree(directory: Path, tree: dict[str, bytes]) -> Path:
    for name, data in tree.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


@pytest.fixture
def published(tmp_path: Path) -> Path:
    directory = write_tree(tmp_path / "d", {"a.bin": b"hello", "sub/b.bin": bytes(5000)})
    write_manifest(directory, build_manifest(directory, "model"))
    return directory


def test_manifest_text_and_digest_are_as_written_by_hand(tmp_path: Path) -> None:
    directory = write_tree(tmp_path, {"a": b"hello"})
    manifest = build_manifest(directory, "model")
    text = (
        '{"files":{"a":{"sha256":"' + HELLO + '","size_bytes":5}},"kind":"model","schema":1}'
    ).encode()
    assert manifest.to_bytes() == text + b"\n"
    assert manifest.digest == hashlib.sha256(text).hexdigest()
    write_manifest(directory, manifest)
    assert read_manifest(directory) == verify_directory(directory) == manifest


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES)
def test_equal_content_has_an_equal_digest(
    tree: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = write_tree(tmp_path_factory.mktemp("x"), tree)
    second = write_tree(tmp_path_factory.mktemp("y"), dict(reversed(list(tree.items()))))
    manifest = build_manifest(first, "model")
    assert {name: entry.size_bytes for name, entry in manifest.files.items()} == {
        name: len(data) for name, data in tree.items()
    }
    assert build_manifest(second, "model").digest == manifest.digest
    assert build_manifest(second, "policy").digest != manifest.digest
    write_manifest(first, manifest)
    assert verify_directory(first).digest == manifest.digest


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_caught(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = write_tree(tmp_path_factory.mktemp("x"), {"a": bytes(range(40)), "s/b": b"z" * 9})
    manifest = build_manifest(directory, "model")
    write_manifest(directory, manifest)
    path = directory / data.draw(st.sampled_from(["a", "s/b", MANIFEST_NAME]))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(ArtifactCorruptError) as refused:
        verify_directory(directory, kind="model")
    said = str(refused.value)
    sizes, digests = re.findall(r"(\d+) bytes", said), re.findall("[0-9a-f]{64}", said)
    # Of a manifest whose size is another number only the size differs.
    assert len({*digests}) == 2 or len({*sizes}) == 2, "found and expected"


def _truncate(directory: Path) -> None:
    os.truncate(directory / "sub/b.bin", 4999)


def _zero_page(directory: Path) -> None:
    (directory / "a.bin").write_bytes(bytes(5))


def _swap(directory: Path) -> None:
    (directory / "a.bin").rename(directory / "t")
    (directory / "sub/b.bin").rename(directory / "a.bin")
    (directory / "t").rename(directory / "sub/b.bin")


def _remove(directory: Path) -> None:
    (directory / "sub/b.bin").unlink()


def _add(directory: Path) -> None:
    (directory / "sub/c.bin").write_bytes(b"")


def _replace_by_link(directory: Path) -> None:
    (directory / "a.bin").rename(directory.parent / "outside")
    (directory / "a.bin").symlink_to(directory.parent / "outside")


def _replace_by_pipe(directory: Path) -> None:
    (directory / "a.bin").unlink()
    os.mkfifo(directory / "a.bin")


def _link_directory(directory: Path) -> None:
    (directory / "sub").rename(directory.parent / "outside")
    (directory / "sub").symlink_to(directory.parent / "outside")


def _break_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).write_bytes((directory / MANIFEST_NAME).read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"sub/b\.bin: 4999 bytes, sha256 [0-9a-f]{64}; need 5000 bytes, sha256"),
        (_zero_page, rf"a\.bin: 5 bytes, sha256 [0-9a-f]{{64}}; need 5 bytes, sha256 {HELLO}"),
        (_swap, r"a\.bin: 5000 bytes"),
        (_remove, r"lacks 1 of 2 files: sub/b\.bin"),
        (_add, r"sub/c\.bin is not in the manifest"),
        (_replace_by_link, r"a\.bin is no longer a regular file"),
        (_replace_by_pipe, r"a\.bin is no longer a regular file"),
        (_link_directory, r"sub is not in the manifest"),
        (_break_manifest, r"manifest\.json is no valid manifest .* sha256 is [0-9a-f]{64}$"),
    ],
)
def test_damage_is_named(published: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(published)
    with pytest.raises(ArtifactCorruptError, match=message):
        verify_directory(published)


def test_without_a_manifest_nothing_was_published(published: Path, tmp_path: Path) -> None:
    (published / MANIFEST_NAME).unlink()
    for directory in (published, tmp_path / "absent"):
        with pytest.raises(ArtifactNotFoundError):
            verify_directory(directory)


@pytest.mark.parametrize("name", ["a.bin", MANIFEST_NAME])
def test_a_read_error_is_neither_absence_nor_damage(
    published: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real_open = os.open
    real_read = Path.read_bytes

    def failing_open(path: Path, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == name:
            raise OSError(5, "Input/output error", str(path))
        return real_open(path, *args, **kwargs)

    def failing_read(path: Path) -> bytes:
        if path.name == name:
            raise OSError(5, "Input/output error", str(path))
        return real_read(path)

    monkeypatch.setattr(os, "open", failing_open)
    monkeypatch.setattr(Path, "read_bytes", failing_read)
    with pytest.raises(OSError, match="Input/output error"):
        verify_directory(published)


def test_bad_input_row_40_a_newer_schema_is_refused_by_name(published: Path) -> None:
    values = json.loads((published / MANIFEST_NAME).read_bytes())
    (published / MANIFEST_NAME).write_text(json.dumps({**values, "schema": 3, "new": 1}))
    with pytest.raises(ArtifactError, match="has schema 3; this code reads <= 1"):
        read_manifest(published)


def test_build_refuses_what_an_artifact_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no file"):
        build_manifest(tmp_path, "model")
    (tmp_path / "real").write_text("x")
    for name in ("link", "pipe"):
        os.symlink("real", tmp_path / name) if name == "link" else os.mkfifo(tmp_path / name)
        with pytest.raises(ArtifactError, match=f"{name} is not a regular file"):
            build_manifest(tmp_path, "model")
        (tmp_path / name).unlink()
    for name in (b"not-utf8-\xff", b"line\nend", b"back\\slash"):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "wb"):
            pass
        with pytest.raises(ArtifactError, match="not a plain relative path"):
            build_manifest(tmp_path, "model")
        os.unlink(path)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", ".", "a\\b", "a\x00b",
     "manifest.json"],
)  # fmt: skip
def test_manifest_refuses_names_that_escape(name: str) -> None:
    with pytest.raises(ValidationError):
        Manifest(kind="model", files={name: FileEntry(size_bytes=5, sha256=HELLO)})


@given(st.binary(max_size=200))
def test_any_bytes_as_a_manifest_raise_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(ArtifactError):
        read_manifest(directory)
    shutil.rmtree(directory)


def test_mutated_manifests_raise_only_our_errors(published: Path) -> None:
    generator = random.Random(0)
    original = (published / MANIFEST_NAME).read_bytes()
    for _ in range(500):
        data = bytearray(original)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        (published / MANIFEST_NAME).write_bytes(data)
        if bytes(data) == original:
            continue
        with pytest.raises(ArtifactError):
            verify_directory(published, kind="model")


def test_external_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = write_tree(tmp_path / "one", {"x.json": b"1", "s/y": b"2"})
    two = write_tree(tmp_path / "two", {"s/y": b"2", "x.json": b"1", ".cache/time": b"now"})
    assert external_artifact(one).digest == external_artifact(two).digest
    artifact = external_artifact(one)
    assert (artifact.kind, artifact.uri, artifact.fingerprint) == ("external", str(one), None)
    (two / "s/y").write_bytes(b"3")
    assert external_artifact(one).digest != external_artifact(two).digest
    assert (
        external_artifact(one / "x.json").digest
        == external_artifact(write_tree(tmp_path, {"z.json": b"1"}) / "z.json").digest
    )


def test_external_follows_links_to_files_as_a_hub_cache_has_them(tmp_path: Path) -> None:
    plain = write_tree(tmp_path / "plain", {"config.json": b"{}"})
    linked = write_tree(tmp_path / "cache", {"blobs/1": b"{}"}) / "snapshot"
    linked.mkdir()
    (linked / "config.json").symlink_to("../blobs/1")
    assert external_artifact(linked).digest == external_artifact(plain).digest
    (linked / "loop").symlink_to(".")
    with pytest.raises(ConfigError, match="is a link to a directory"):
        external_artifact(linked)


def test_external_absent_or_empty_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^data\.train: .*nope does not exist \(cwd is "):
        external_artifact(Path("nope"), "data.train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no file"):
        external_artifact(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/link").symlink_to("gone")
    with pytest.raises(ConfigError, match="not a readable file"):
        external_artifact(tmp_path / "broken")
