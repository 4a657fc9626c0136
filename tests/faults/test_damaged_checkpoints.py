"""Published bytes that change afterwards are refused, with the file and both digests.

Row 9 of the fault matrix: a flipped bit, a zeroed page, a file cut short, two files or two ranges
that changed places; in every file of a checkpoint, its manifest included. The damages are drawn
from a seed; one that changes nothing (a page of zeros) is drawn again.
"""

import hashlib
import logging
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sharded_run import NUM_STEPS, save_steps

from engines.checkpoint.step_store import StepCheckpoints
from infra.errors import ArtifactCorruptError
from infra.store.artifacts import MANIFEST_NAME
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage

pytestmark = pytest.mark.slow

NUM_DAMAGES = 300
PAGE_BYTES = 4096

Contents = dict[str, bytes]
Damage = Callable[[Contents, random.Random], Contents]
"""What is altered of a checkpoint, by name."""


def flipped_bit(contents: Contents, drawn: random.Random) -> Contents:
    name = drawn.choice(sorted(contents))
    data = bytearray(contents[name])
    data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    return {name: bytes(data)}


def zero_page(contents: Contents, drawn: random.Random) -> Contents:
    name = drawn.choice(sorted(contents))
    data = contents[name]
    start = PAGE_BYTES * drawn.randrange(-(-len(data) // PAGE_BYTES))
    length = min(PAGE_BYTES, len(data) - start)
    return {name: data[:start] + bytes(length) + data[start + length :]}


def truncation(contents: Contents, drawn: random.Random) -> Contents:
    name = drawn.choice(sorted(contents))
    return {name: contents[name][: drawn.randrange(len(contents[name]))]}


def swap(contents: Contents, drawn: random.Random) -> Contents:
    if drawn.random() < 0.5:
        one, other = drawn.sample(sorted(contents), 2)
        return {one: contents[other], other: contents[one]}
    name = drawn.choice(sorted(contents))
    data = contents[name]
    length = drawn.randrange(1, len(data) // 2)
    first = drawn.randrange(len(data) - 2 * length)
    second = drawn.randrange(first + length, len(data) - length)
    middle = data[first + length : second]
    ranges = data[second : second + length] + middle + data[first : first + length]
    return {name: data[:first] + ranges + data[second + length :]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_steps(tmp_path_factory.mktemp("run"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory that is written to no disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as directory:
        yield Path(directory)


def damaged(directory: Path, damage: Damage) -> Iterator[tuple[Contents, Contents]]:
    """What was in a checkpoint and what is there now, `NUM_DAMAGES` times; restored each time."""
    whole = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    drawn = random.Random(0)
    num_damages = 0
    while num_damages < NUM_DAMAGES:
        altered = damage(whole, drawn)
        if all(whole[name] == data for name, data in altered.items()):
            continue
        for name, data in altered.items():
            (directory / name).write_bytes(data)
        yield whole, altered
        for name in altered:
            (directory / name).write_bytes(whole[name])
        num_damages += 1


def check_refusal(message: str, directory: Path, whole: Contents, altered: Contents) -> None:
    """A message names an altered file with its digest now and before."""
    digests = re.findall(r"\b[0-9a-f]{64}\b", message.replace(str(directory), ""))
    assert len(set(digests)) == 2, message
    now, before = (
        {name: hashlib.sha256(data[name]).hexdigest() for name in altered}
        for data in (altered, whole)
    )
    named = [name for name in altered if f"{directory / name}: " in message]
    if MANIFEST_NAME in altered:
        # The manifest itself, or a file that it tells wrong things of, with the manifest beside it.
        assert named or MANIFEST_NAME in message.replace(str(directory), ""), message
    else:
        assert {now[named[0]], before[named[0]]} == set(digests), message


@pytest.mark.parametrize("damage", [flipped_bit, zero_page, truncation, swap])
def test_fault_row_9_damaged_step_falls_back_to_previous_step(
    saved: Path,
    memory: Path,
    damage: Damage,
    caplog: pytest.LogCaptureFixture,
    record_property: Callable[[str, object], None],
) -> None:
    """Through what a resume calls."""
    steps = shutil.copytree(saved, memory / "steps")
    newest = steps / f"step-{NUM_STEPS:08d}"
    store = StepCheckpoints(steps, keep=2)
    num_refused = 0
    for whole, altered in damaged(newest, damage):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = store.latest_valid()
        assert found is not None
        assert found.step == NUM_STEPS - 1, f"{sorted(altered)} are altered"
        check_refusal(caplog.text, newest, whole, altered)
        num_refused += 1
    assert num_refused == NUM_DAMAGES
    record_property("F7", num_refused)
    assert (restored := store.latest_valid()) is not None
    assert restored.step == NUM_STEPS


@pytest.mark.parametrize("damage", [flipped_bit, zero_page, truncation, swap])
def test_fault_row_9_a_damaged_artifact_is_refused(
    saved: Path, memory: Path, damage: Damage
) -> None:
    """Through what the next stage's job calls."""
    source = shutil.copytree(saved / f"step-{NUM_STEPS:08d}" / "checkpoint", memory / "out")
    artifact: Artifact = LocalStorage(memory).publish(source, "policy")
    for whole, altered in damaged(Path(artifact.uri), damage):
        with pytest.raises(ArtifactCorruptError) as refused:
            LocalStorage(memory).local_copy(artifact)
        check_refusal(str(refused.value), Path(artifact.uri), whole, altered)
    assert LocalStorage(memory).local_copy(artifact) == Path(artifact.uri)
