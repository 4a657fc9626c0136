"""Run a program as the ranks of one process group on this machine, and be one of them.

Promises: no process outlives `launch`, and a rank that waits for a collective which another never
enters ends with its deadline.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hardware.detection import detect
from infra.host.processes import pick_ports

TIMEOUT_S = 60.0
"""Of a collective."""
_LOG_CHARS = 4000


def launch(
    program: Sequence[str],
    world_size: int,
    logs: Path,
    deadline_s: float,
    expected_code: int = 0,
) -> None:
    """Run Python with the same arguments as every rank, and wait for all of them.

    Args:
        program: arguments of Python; `--rank`, `--world-size` and `--port` are added.
        world_size: number of processes.
        logs: an existing directory for what they print.
        deadline_s: for all of them together, in seconds.
        expected_code: how every process ends; -N is by signal N.

    Raises:
        AssertionError: a process ended otherwise; the text holds what they printed.
        subprocess.TimeoutExpired: a process did not end.
    """
    argv = [sys.executable, *program, f"--world-size={world_size}", f"--port={pick_ports(1)[0]}"]
    paths = [logs / f"rank-{world_size}-{rank}.log" for rank in range(world_size)]
    with contextlib.ExitStack() as ending:
        processes = []
        for rank, path in enumerate(paths):
            file = ending.enter_context(path.open("w"))
            process = subprocess.Popen(
                [*argv, f"--rank={rank}"], stdout=file, stderr=subprocess.STDOUT
            )
            ending.enter_context(process)
            ending.callback(process.kill)
            processes.append(process)
        ends_at = time.monotonic() + deadline_s
        codes = [process.wait(max(0.0, ends_at - time.monotonic())) for process in processes]
    said = (f"{path.stem}:\n{path.read_text()[-_LOG_CHARS:]}" for path in paths)
    assert codes == [expected_code] * world_size, "\n".join(said)


def rank_arguments() -> argparse.ArgumentParser:
    """A parser of what `launch` adds; the program adds its own."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "world-size", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def join_group(args: argparse.Namespace, platform_name: str = "cpu") -> None:
    """Take a device and meet the other ranks; one thread each. A world of one has no group.

    Args:
        args: of `rank_arguments`.
        platform_name: hardware platform of the ranks.
    """
    torch.set_num_threads(1)
    platform, _ = detect(platform_name)
    if platform.device_count() > 1:
        platform.set_device(args.rank % platform.device_count())
    if args.world_size > 1:
        dist.init_process_group(
            platform.process_group_backend,
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
