"""A tiny training run that saves each step, with one storage call after the other failing.

A program and no test module: its forks need a process without threads. Prints its figures as JSON.

    kill plain | kill background   SIGKILL at the n-th call; a fresh process goes on
    fail 5 | fail 28               the n-th call fails with that errno
    read 5                         the n-th call of a resume that reads fails
    order plain | order background what a power loss could take away
"""

import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path, PurePath

import torch
from storage_calls import KILL, every_call, traced, watched
from sync_order import not_durable

from engines.checkpoint.background import BackgroundSave, StagingBuffers, write_in_background
from engines.checkpoint.engine_state import (
    EngineScalars,
    load_engine_state,
    save_engine_state,
    stage_engine_state,
)
from engines.checkpoint.sharded import own_regions
from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from hardware.cpu import CPUPlatform
from infra.store.step_directories import step_directories, verify_step

ROWS = 8
NUM_BEFORE, NUM_STEPS = 2, 4
"""Steps that are saved when the kills begin, and at the end."""
OS_ERROR, OTHER_STEP = 10, 12
"""Exit codes: an `OSError` of the injected errno; a resume from elsewhere, or from scratch."""
PLATFORM = CPUPlatform()


class Run:
    """Model, optimizer, random generator and cursor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for weight in self.model.parameters():
            zeros = [torch.zeros_like(weight) for _ in range(2)]
            self.optimizer.state[weight] = {
                "step": torch.tensor(0.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1],
            }  # fmt: skip
        self.rows = torch.randn(NUM_STEPS * ROWS, 8)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        moments = {
            f"optimizer.{moment}.{name}": self.optimizer.state[weight][moment]
            for name, weight in named.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return {f"model.{name}": weight.data for name, weight in named.items()} | moments

    def scalars(self) -> EngineScalars:
        return EngineScalars(
            step=self.step, num_steps=self.step, schedule_step=self.step,
            num_optimizer_steps=self.step, world_size=1, backend="tiny",
        )  # fmt: skip

    def resume(self, root: Path) -> None:
        newest = StepCheckpoints(root, 2).latest_valid()
        if newest is None:
            return
        load_engine_state(newest.path, self.tensors(), None, PLATFORM)
        self.step = newest.step
        for state in self.optimizer.state.values():
            state["step"].fill_(self.step)

    def advance(self) -> None:
        rows = self.rows[ROWS * self.step : ROWS * (self.step + 1)]
        self.optimizer.zero_grad()
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        self.step += 1

    def save(self, root: Path, *, background: bool) -> None:
        store, state = StepCheckpoints(root, 2), TrainerState(self.step, {"row": ROWS * self.step})
        if not background:
            store.save(
                self.step,
                lambda path: save_engine_state(
                    path, own_regions(self.tensors()), self.scalars(), PLATFORM
                ),
                state,
            )
            return
        saving = BackgroundSave(store, self.step, state, 1, timeout_s=20.0)

        def stage(path: Path) -> None:
            write = stage_engine_state(
                path, own_regions(self.tensors()), self.scalars(), PLATFORM, StagingBuffers()
            )
            write_in_background(write, path, 0)

        saving.stage(stage)
        saving.result()


def go_on(root: Path, until: int, *, background: bool = False) -> None:
    run = Run()
    run.resume(root)
    while run.step < until:
        run.advance()
        run.save(root, background=background)


def digests(root: Path) -> dict[int, str]:
    """Of every step that a reader sees; raises where one is not whole."""
    return {step: verify_step(root, step)[1] for step in step_directories(root)}


def in_fork(work: Callable[[], object]) -> int:
    return watched(work, frozenset(), lambda call: 0)


class Base:
    """A run after two steps, to be copied, and what it comes to when nothing disturbs it."""

    def __init__(self, directory: Path) -> None:
        self._saved, self.root = directory / "saved", directory / "steps"
        # All of the work once, so that no fork imports anything.
        for step in (1, 2):
            go_on(directory / "first", step, background=True)
        assert threading.active_count() == 1
        assert in_fork(lambda: go_on(self._saved, NUM_BEFORE)) == 0
        self.copy()
        assert in_fork(lambda: go_on(self.root, NUM_STEPS)) == 0
        self.expected = digests(self.root)
        assert list(self.expected) == [NUM_STEPS - 1, NUM_STEPS]

    def copy(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self._saved, self.root)

    def check_rerun(self) -> None:
        """A fresh process comes to the same, bit for bit; older steps may be left."""
        assert in_fork(lambda: go_on(self.root, NUM_STEPS)) == 0
        assert digests(self.root).items() >= self.expected.items()


def kills(base: Base, *, background: bool) -> dict[str, object]:
    num_points, newest = 0, set[int]()
    work = lambda: go_on(base.root, NUM_STEPS, background=background)  # noqa: E731
    for point in every_call(work, [base.root], KILL, base.copy):
        assert point.code == -9
        newest.add(max(digests(base.root)))
        base.check_rerun()
        num_points += 1
    return {"points": num_points, "newest": sorted(newest)}


def failures(base: Base, error: int) -> dict[str, object]:
    num_points, swallowed = 0, []
    for point in every_call(lambda: told(base, error), [base.root], error, base.copy):
        there = digests(base.root)
        named = any(published(call.paths[-1]) for call in point.before)
        assert (NUM_BEFORE + 1 in there) == named, point
        assert NUM_BEFORE in there, point
        if point.code == 0:
            swallowed.append(f"{point.call.name} {Path(point.call.paths[-1]).name[:4]}")
        else:
            assert point.code == OS_ERROR, point
        base.check_rerun()
        num_points += 1
    return {"points": num_points, "swallowed": sorted(set(swallowed))}


def order(base: Base, *, background: bool) -> dict[str, object]:
    base.copy()
    calls = traced(lambda: go_on(base.root, NUM_STEPS, background=background), [base.root])
    names = [PurePath(c.paths[-1]).name for c in calls if published(c.paths[-1])]
    return {"named": names, "not_durable": not_durable(calls, published)}


def told(base: Base, error: int) -> None:
    """Save one more step; what its caller is told becomes the exit code."""
    try:
        go_on(base.root, NUM_BEFORE + 1)
    except OSError as problem:
        os._exit(OS_ERROR if problem.errno == error else 1)


def published(path: str) -> bool:
    return PurePath(path).name.startswith("step-")


def reads(base: Base, error: int) -> dict[str, object]:
    num_points, harmless = 0, 0

    def work() -> None:
        run = Run()
        try:
            run.resume(base.root)
        except OSError as problem:
            os._exit(OS_ERROR if problem.errno == error else 1)
        os._exit(0 if run.step == NUM_BEFORE else OTHER_STEP)

    base.copy()
    for point in every_call(work, [base.root], error, lambda: None, changes=False):
        assert point.code in {0, OS_ERROR}, point
        num_points += 1
        harmless += point.code == 0
    return {"points": num_points, "harmless": harmless}


def main(directory: str, what: str, how: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    base = Base(Path(directory))
    match what:
        case "kill":
            figures = kills(base, background=how == "background")
        case "fail":
            figures = failures(base, int(how))
        case "order":
            figures = order(base, background=how == "background")
        case _:
            figures = reads(base, int(how))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
