"""Ranks whose machine has another disk than the driver's, and what passes between them."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engines import remote_files
from engines.checkpoint.background import BackgroundSave
from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from engines.config.training import TrainingConfig
from engines.controller import ray_group
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import reserve, this_node
from engines.controller.ray_group import RayGroupOptions, RayWorkerGroup
from engines.remote_files import Disk, DiskAccess, OtherDisk, access_for
from engines.training.spec import POLICY
from infra.errors import DeadlineError
from infra.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exclusive, pytest.mark.usefixtures("cluster")]


def access(directory: Path) -> DiskAccess:
    """As of a process that does not find the mark."""
    found = access_for(["another node"], this_node(), directory)
    assert found is not None
    assert type(found.disk()) is Disk
    return replace(found, mark=directory / "not here")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherDisk]:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    found = access(tmp_path / "stage").disk()
    assert isinstance(found, OtherDisk)
    yield found
    found.close()


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def test_a_group_on_the_drivers_node_needs_no_access(tmp_path: Path) -> None:
    assert access_for([this_node()] * 2, this_node(), tmp_path / "stage") is None
    assert not (tmp_path / "stage").exists()


def test_directories_come_whole_once_and_go_back_part_by_part(
    disk: OtherDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    (given / "below").mkdir(parents=True)
    (given / "large").write_bytes(os.urandom(remote_files.PART_BYTES + 7))
    (given / "below" / "empty").write_bytes(b"")
    (given / "link").symlink_to(given / "large")  # as in a cache of the hub
    here = disk.bring(given)
    assert here.is_relative_to(tmp_path / "home")
    assert contents(here) == contents(given)
    assert disk.bring(given) == here
    with pytest.raises(NotADirectoryError):
        disk.deliver(disk.bring(here), given / "large" / "no directory")
    monkeypatch.setattr(remote_files, "PART_BYTES", 2**20)
    whole = contents(given)
    own, target = disk.own(tmp_path / "made"), tmp_path / "made"
    for name, data in whole.items():
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_bytes(data)
    disk.deliver(own, target)
    assert contents(target) == whole
    assert not own.exists()


def test_the_driver_reads_a_log_and_a_file_that_is_overwritten(
    disk: OtherDisk, tmp_path: Path
) -> None:
    path = tmp_path / "stage" / "log"
    disk.follow(path, 0.05)

    def follows(text: str) -> None:
        wait_for(lambda: path.exists() and path.read_text() == text, f"{text!r} to arrive", 60.0)

    disk.local(path).write_text("one\n")
    follows("one\n")
    with disk.local(path).open("a") as file:
        file.write("two\n")
    follows("one\ntwo\n")
    disk.local(path).write_text("ONE\nTWO\n")
    follows("ONE\nTWO\n")


@pytest.fixture
def ranks(
    policy_spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RayWorkerGroup]:
    """Two, which share the cluster's machine and do not know it."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    elsewhere = access(tmp_path / "ranks")
    monkeypatch.setattr(ray_group, "access_for", lambda *_: elsewhere)
    options = RayGroupOptions(
        world_size=2,
        backend="gloo",
        num_threads=1,
        log_dir=tmp_path / "ranks",
        heartbeat_s=0.2,
    )
    training = TrainingConfig(num_threads=1, num_workers=2)
    role = replace(policy_spec.policy, training=training)
    spec = replace(policy_spec, roles={POLICY: role}, rollout=None)
    group = RayWorkerGroup(partial(ModelWorker, spec), options, reserve([{"num_cpus": 1}] * 2))
    yield group
    group.close()


def test_ranks_of_another_disk_save_and_continue(ranks: RayWorkerGroup, tmp_path: Path) -> None:
    steps = StepCheckpoints(tmp_path / "steps", 2)
    saved = steps.save(
        1, lambda path: ranks.run(ModelWorker.save_checkpoint, path, 1), TrainerState(1)
    )
    names = {*contents(saved.path)}
    assert {"engine.json", "rng/rank-00000.safetensors", "rng/rank-00001.safetensors"} <= names
    assert {name for name in names if "shard-00001" in name}
    assert ranks.run(ModelWorker.load_checkpoint, saved.path) == 1
    background = BackgroundSave(steps, 2, TrainerState(2), 2, 60.0)
    background.stage(lambda path: ranks.run(ModelWorker.begin_checkpoint, path, 2))
    again = background.result().path
    assert {*contents(again)} == names
    assert ranks.run(ModelWorker.load_checkpoint, again) == 2
    for kind in ("log", "heartbeat"):
        path = tmp_path / "ranks" / f"rank-1.{kind}"
        wait_for(path.exists, f"{path.name} to arrive", 60.0)


def test_a_driver_that_does_not_answer_is_named(
    disk: OtherDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "ANSWER_DEADLINE_S", 2.0)
    never_written = tmp_path / "queue"
    os.mkfifo(never_written)
    with pytest.raises(DeadlineError, match=f"2 s .* driver's machine to read {never_written}"):
        disk._ask("read", never_written, 0)
    os.close(os.open(never_written, os.O_WRONLY))  # lets it end
