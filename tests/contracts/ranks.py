"""Start the ranks of the backend contract and be one of them.

All layouts of one world size run in one set of processes: importing the libraries costs more
than the cases do.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlhf.testing.backend_cases import run_cases
from rlhf.testing.context import Context
from rlhf.testing.launch import in_groups_of_their_own, launch, rank_arguments
from rlhf.testing.layouts import claimed_layouts

from engines.config.backends import excluded_by
from infra.plugins import import_external_modules

DEADLINE_S = 900.0

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
    launch(
        [
            "-m", "rlhf.testing.ranks", f"--backend={backend}", f"--root={root}",
            f"--claims={','.join(sorted(claims))}", f"--platform={platform}",
        ],
        world_size, root, DEADLINE_S,
    )  # fmt: skip
    files = [root / f"results-{world_size}-{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    for name in ("backend", "claims", "root", "platform"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    import_external_modules()
    claims = frozenset(args.claims.split(","))
    layouts = claimed_layouts(claims, args.world_size)
    results = {}
    for layout in in_groups_of_their_own(args, args.platform, layouts):
        own = claims - excluded_by(args.backend, layout.needs)
        root, platform = Path(args.root), args.platform
        results[layout.name] = run_cases(Context(args.backend, own, layout, root, platform))
    path = Path(args.root) / f"results-{args.world_size}-{args.rank}.json"
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
