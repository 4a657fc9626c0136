"""Start the ranks of the backend contract and be one of them.

All layouts of one world size run in one set of processes: importing the libraries costs more
than the cases do.
"""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf.testing.backend_cases import Context, run_cases
from rlhf.testing.layouts import claimed_layouts

from engines import collectives
from engines.config.backends import excluded_by
from engines.external_modules import import_external_modules
from hardware.registry import detect

DEADLINE_S = 900.0
TIMEOUT_S = 60.0

RankResults = list[dict[str, Any]]
"""For each rank: layout -> case -> results."""


def run_ranks(
    backend: str, claims: Collection[str], root: Path, world_size: int, platform: str
) -> RankResults:
    """Run every claimed layout of a world size.

    Args:
        backend: name of the backend.
        claims: what it can do.
        root: directory of the tiny models.
        world_size: number of processes.
        platform: hardware platform of the ranks.

    Returns:
        One entry per rank.

    Raises:
        AssertionError: a process did not end well; the text holds what they printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [
        sys.executable, "-m", "rlhf.testing.ranks", f"--backend={backend}",
        f"--claims={','.join(sorted(claims))}", f"--root={root}", f"--world-size={world_size}",
        f"--port={port}", f"--platform={platform}",
    ]  # fmt: skip
    logs = [root / f"log-{world_size}-{rank}.txt" for rank in range(world_size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [*argv, f"--rank={rank}"], stdout=file, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(f"rank {r}:\n{log.read_text()[-4000:]}" for r, log in enumerate(logs))
    assert codes == [0] * world_size, text
    files = [root / f"results-{world_size}-{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser()
    names = ("backend", "claims", "root", "rank", "world-size", "port", "platform")
    for name in names:
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    import_external_modules()
    rank, world_size = int(args.rank), int(args.world_size)
    if world_size > 1:
        dist.init_process_group(
            detect(args.platform)[0].communication_backend,
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    claims = frozenset(args.claims.split(","))
    results = {
        layout.name: run_cases(
            Context(
                args.backend,
                claims - excluded_by(args.backend, layout.needs),
                layout,
                Path(args.root),
                args.platform,
            )
        )
        for layout in claimed_layouts(claims, world_size)
    }
    path = Path(args.root) / f"results-{world_size}-{rank}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
