"""Who works on which stage, as `rlhf status` tells it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.commands.cli import main
from infra import env
from infra.services.stack import held_stages
from infra.store.heartbeat import Heartbeat
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Holder
from infra.store.storage import LocalStorage
from infra.store.work_channel import JobProblem

FINGERPRINT = "ab" * 32


def test_fault_row_27_a_held_stage_is_shown_with_holder_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    storage = LocalStorage(tmp_path / "store")
    holder = Holder(id="me", process=own_stamp(), ray_job="sft-abab-a0")
    storage.attempts.hold(FINGERPRINT, holder, 0)
    channel = storage.channel(FINGERPRINT)
    (held,) = storage.attempts.entries(FINGERPRINT)
    by = f"{FINGERPRINT[:12]} is held by {socket.gethostname()} pid {own_stamp().split('.')[1]}"
    with Heartbeat(channel.local_dir(0) / "heartbeat", every_s=5.0) as beats:
        beats.enter("train", 60.0)
        beats.step = 7
    (line,) = held_stages(tmp_path / "store")
    assert line.startswith(f"{by} since {held.made_at}: sft-abab-a0, train step 7 (last sign of ")
    assert main(["status"]) == 1, "no server is up"
    assert capsys.readouterr().out.splitlines()[-1].startswith(by)
    channel.write_error(0, JobProblem(type="ValueError", message="no", exit_code=1))
    assert list(held_stages(tmp_path / "store")) == []


def test_bad_input_row_41_job_with_dead_submitter_is_still_held(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    stamp = "from infra.store.process_stamp import own_stamp; print(own_stamp())"
    argv = [sys.executable, "-c", stamp]
    gone = subprocess.run(
        argv, capture_output=True, text=True, check=True, env=env.child_environment()
    ).stdout.strip()
    storage.attempts.hold(FINGERPRINT, Holder(id="me", process=gone), 0)
    assert list(held_stages(tmp_path / "store")) == []
    with Heartbeat(storage.channel(FINGERPRINT).local_dir(0) / "heartbeat", every_s=5.0):
        (line,) = held_stages(tmp_path / "store")
    assert ", which is gone: none, start step 0 " in line
