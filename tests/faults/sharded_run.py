"""Two FSDP2 ranks that train a tiny model and save its steps, for the tests to damage."""

from collections.abc import Callable
from pathlib import Path

from rlhf.testing.context import Context, train
from rlhf.testing.killed import SharedStore
from rlhf.testing.launch import join_group, launch, rank_arguments
from rlhf.testing.layouts import LAYOUTS
from rlhf.testing.tiny_models import write_tiny_models

from engines import collectives
from engines.training.base import BaseEngine

NUM_STEPS = 2
NUM_RANKS = 2


def save_steps(root: Path) -> Path:
    """Let two ranks train and save each step.

    Args:
        root: an empty directory.

    Returns:
        The directory of the step checkpoints.
    """
    write_tiny_models(root)
    launch([__file__, f"--root={root}"], NUM_RANKS, root, 120.0)
    return root / "steps"


def be_rank(play: Callable[[BaseEngine, SharedStore, Path], None]) -> None:
    """Be one of the two, as the command line says.

    Args:
        play: what a rank does with its engine, the step checkpoints of both, and the directory of
            the run.
    """
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    layout = next(layout for layout in LAYOUTS if layout.name == "data2")
    engine = Context("fsdp2", frozenset(), layout, args.root).engine()
    play(engine, SharedStore(args.root / "steps", engine), args.root)
    collectives.close_process_group()


def _train(engine: BaseEngine, store: SharedStore, _: Path) -> None:
    for step in range(NUM_STEPS):
        train(engine, range(step, step + 1))
        store.save(step + 1)


if __name__ == "__main__":
    be_rank(_train)
