"""What every test may count on, wherever the tests are started from."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import Leftovers


def pytest_configure(config: pytest.Config) -> None:
    """Look for what each test leaves behind, and let SIGINT reach what tests start.

    A shell's background job, and its children, ignore it.
    """
    config.pluginmanager.register(Leftovers())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """More than cores: a third of their time tests wait, for processes that they start.

    Job environments, which the contracts run in too, have no xdist.
    """
    num_cores = len(os.sched_getaffinity(0))
    return num_cores + max(1, num_cores // 8)


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """End the groups that a module's engines made in this process.

    Gloo has threads for each that wake up a hundred times a second: a worker that kept those of
    all modules would be slow for that alone.
    """
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
