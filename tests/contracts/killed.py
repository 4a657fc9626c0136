"""One rank of a run that is killed while it saves, or of the run that continues it.

Started by `test_checkpoint_kill`. A killed run publishes one checkpoint; of the next there are
files, and then every rank kills itself, in one of two moments:

    writing    the state is copied and threads write it: as soon as a file of any rank appears
    written    every file is durable and in the manifest; only the visible name is missing

Where ranks could be killed inside of a collective they meet through files instead.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from threading import Event
from typing import NoReturn

from rlhf.testing.context import Context, train
from rlhf.testing.launch import TIMEOUT_S, join_group, rank_arguments
from rlhf.testing.layouts import LAYOUTS
from rlhf.testing.plain_loop import NUM_STEPS

from engines import collectives
from engines.checkpoint.background import BackgroundSave, write_in_background
from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from engines.training.base import BaseEngine
from infra.plugins import import_external_modules
from infra.waiting import wait_for

SAVED = 2
"""Steps of the published checkpoint; the torn one is of the next step."""
MOMENTS = ("writing", "written")
_POLL_S = 0.0005


class SharedStore:
    """The step checkpoints of all ranks: rank 0 keeps them, every rank writes.

    Args:
        root: of the checkpoints.
        engine: of this rank.
    """

    def __init__(self, root: Path, engine: BaseEngine) -> None:
        self._root, self._engine = root, engine
        self._checkpoints = StepCheckpoints(root, keep=2)

    def newest(self) -> tuple[int, Path]:
        """Step and files of what the run continues from. Collective."""
        found = self._checkpoints.latest_valid() if self._engine.rank == 0 else None
        step, path = json.loads(_of_rank_0(found and json.dumps([found.step, str(found.path)])))
        return step, Path(path)

    def save(self, step: int) -> None:
        """Publish a checkpoint. Collective."""
        if self._engine.rank == 0:
            self._checkpoints.save(step, lambda path: self._write(path, step), TrainerState(step))
        else:
            self._write(None, step)

    def _write(self, path: Path | None, step: int) -> None:
        self._engine.save_checkpoint(Path(_of_rank_0(path and str(path))), step)
        self._meet(f"written-{step}")

    def die_written(self, step: int) -> NoReturn:
        """Save; the armed fault kills rank 0, and the others die when there is a manifest."""
        self.save(step)
        _die_when_there_is(self._root, ".tmp-*/manifest.json")

    def die_writing(self, step: int) -> NoReturn:
        """Save in the background; no rank ever says that it is done."""
        size = self._engine.world_size
        if self._engine.rank == 0:
            saving = BackgroundSave(
                self._checkpoints, step, TrainerState(step), size, timeout_s=TIMEOUT_S
            )
            saving.stage(lambda path: self._write_and_die(path, step))
        self._write_and_die(None, step)

    def _write_and_die(self, path: Path | None, step: int) -> NoReturn:
        shared = Path(_of_rank_0(path and str(path)))
        write = self._engine.begin_checkpoint(shared, step)
        self._meet(f"staged-{step}")

        def write_and_hang() -> None:
            write()
            Event().wait()

        write_in_background(write_and_hang, shared, self._engine.rank)
        _die_when_there_is(shared, "**/*.safetensors")

    def _meet(self, where: str) -> None:
        """Wait for all ranks, without a collective."""
        signs = [
            self._root.with_name(f"{self._root.name}-{where}-{rank}")
            for rank in range(self._engine.world_size)
        ]
        signs[self._engine.rank].touch()
        wait_for(lambda: all(sign.exists() for sign in signs), where, TIMEOUT_S, _POLL_S)


def _of_rank_0(text: str | None) -> str:
    """What rank 0 says. Collective."""
    said = collectives.gather_texts(text)[0]
    assert said is not None
    return said


def _die_when_there_is(directory: Path, pattern: str) -> NoReturn:
    wait_for(lambda: any(directory.glob(pattern)), pattern, TIMEOUT_S, _POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


def be_killed(context: Context, args: argparse.Namespace) -> NoReturn:
    """Train, save, train on, and die while the next checkpoint is saved."""
    engine = context.engine()
    store = SharedStore(args.out / args.moment, engine)
    train(engine, range(SAVED))
    store.save(SAVED)
    train(engine, range(SAVED, SAVED + 1))
    if args.moment == "writing":
        store.die_writing(SAVED + 1)
    store.die_written(SAVED + 1)


def carry_on(context: Context, args: argparse.Namespace) -> dict[str, object]:
    """Continue the killed runs; also the steps of one that nothing interrupted."""
    results: dict[str, object] = {"whole": train(context.engine())}
    for moment in args.carry_on.split(","):
        engine = context.engine(load=False)
        step, path = SharedStore(args.out / moment, engine).newest()
        loaded = engine.load_checkpoint(path)
        steps = train(engine, range(loaded, NUM_STEPS))
        results[moment] = {"step": step, "loaded": loaded, "steps": steps}
    return results


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    for name in ("backend", "platform", "layout"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--moment", choices=MOMENTS, help="be killed then")
    parser.add_argument("--carry-on", help="moments of killed runs, by commas")
    args = parser.parse_args()
    import_external_modules()
    join_group(args, args.platform)
    layout = next(layout for layout in LAYOUTS if layout.name == args.layout)
    context = Context(args.backend, frozenset(), layout, args.root, args.platform)
    if args.moment:
        be_killed(context, args)
    path = args.out / f"continued-{args.rank}.json"
    path.write_text(json.dumps(carry_on(context, args)), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
