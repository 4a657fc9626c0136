"""Run a program as the ranks of one process group on this machine, and be one of them.

Promises: no process outlives `launch`, and a rank that waits for a collective which another never
enters ends with its deadline.
"""

import argparse
import contextlib
import gc
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from rlhf.testing.forked import Forked, start_python

from engines import collectives
from hardware.base import PlatformBase
from hardware.detection import detect
from infra.host.ports import pick_ports

TIMEOUT_S = 240.0
"""Of a collective, and of a wait for the other ranks; a busy machine runs one of them late."""
_LOG_CHARS = 4000
Work = TypeVar("Work")


def launch(
    program: Sequence[str],
    world_size: int,
    logs: Path,
    deadline_s: float,
    expected_code: int = 0,
    start: Callable[[Sequence[str], Path], Forked | subprocess.Popen[bytes]] = start_python,
) -> None:
    """Run Python with the same arguments as every rank, and wait for all of them.

    Args:
        program: arguments of Python; `--rank`, `--world-size` and `--port` are added.
        world_size: number of processes.
        logs: an existing directory for what they print.
        deadline_s: for all of them together, in seconds.
        expected_code: how every process ends; -N is by signal N.
        start: `start_python`, or `start_python_anew` for one that is no fork.

    Raises:
        AssertionError: a process ended otherwise; the text holds what they printed.
        subprocess.TimeoutExpired: a process did not end.
    """
    argv = [*program, f"--world-size={world_size}", f"--port={pick_ports(1)[0]}"]
    paths = [logs / f"rank-{world_size}-{rank}.log" for rank in range(world_size)]
    with contextlib.ExitStack() as ending:
        processes = []
        for rank, path in enumerate(paths):
            process = start([*argv, f"--rank={rank}"], path)
            ending.callback(_end, process)
            processes.append(process)
        ends_at = time.monotonic() + deadline_s
        codes = [process.wait(max(0.0, ends_at - time.monotonic())) for process in processes]
    said = (f"{path.stem}:\n{path.read_text()[-_LOG_CHARS:]}" for path in paths)
    assert codes == [expected_code] * world_size, "\n".join(said)


def _end(process: Forked | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


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
    _join(args, _take_device(args, platform_name), _meeting(args), "whole")


def in_groups_of_their_own(
    args: argparse.Namespace, platform_name: str, works: Iterable[Work]
) -> Iterator[Work]:
    """As `join_group`, but anew for each piece of work: its group and its meshes end with it.

    Each group of gloo has threads that wake up a hundred times a second for as long as it lives: a
    rank that kept those of ten layouts would be busy with nothing else.

    Args:
        args: of `rank_arguments`.
        platform_name: hardware platform of the ranks.
        works: the same on every rank.

    Yields:
        Work: each of them.
    """
    platform, store = _take_device(args, platform_name), _meeting(args)
    for place, work in enumerate(works):
        _join(args, platform, store, f"{place}")
        yield work
        # What still holds a group is garbage by now, and a rank that left first would be missed.
        gc.collect()
        if store is not None:
            store.set(f"{place} done by {args.rank}", "")
            store.wait([f"{place} done by {rank}" for rank in range(args.world_size)])
        collectives.close_process_group()
    if store is not None:
        store.set(f"left by {args.rank}", "")
        if args.rank == 0:  # it serves the store, and the others may still wait for an answer
            store.wait([f"left by {rank}" for rank in range(args.world_size)])


def _take_device(args: argparse.Namespace, platform_name: str) -> PlatformBase:
    torch.set_num_threads(1)
    platform, _ = detect(platform_name)
    if platform.device_count() > 1:
        platform.set_device(args.rank % platform.device_count())
    return platform


def _meeting(args: argparse.Namespace) -> dist.TCPStore | None:
    if args.world_size == 1:
        return None
    wait = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore("127.0.0.1", args.port, args.world_size, args.rank == 0, wait)


def _join(
    args: argparse.Namespace, platform: PlatformBase, store: dist.TCPStore | None, name: str
) -> None:
    if store is not None:
        dist.init_process_group(
            platform.process_group_backend,
            store=dist.PrefixStore(name, store),
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
