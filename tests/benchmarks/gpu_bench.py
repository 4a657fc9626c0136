"""What one device reaches: `make gpu-bench`, or `python tests/benchmarks/gpu_bench.py`.

The measurements stand in `MEASUREMENTS`, the most important first. Each runs in a process of its
own, forked from this one, which has the libraries loaded and never opens the device: a crash, or an
error of the device, ends one measurement only. `--limit-s` bounds all of them: one that has less
time left than it needs is not started, and one that is still running at the end is ended, with
what it measured so far.

Writes JSON lines to `--out` (the stack, then one line per figure) and prints a Markdown table for
`docs/benchmarks.md`. Without a GPU, or with `--device cpu`, a tiny model shows that everything
runs; its figures mean nothing and are compared with no goal.

A further measurement is a function of a `Setup` that yields figures, and a row of `MEASUREMENTS`.
"""

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from gpu_figures import (
    ROOT,
    Figure,
    Measure,
    NeedsError,
    NotMeasured,
    Setup,
    Stack,
    opened,
    stack_of,
    table,
)
from gpu_models import SHAPES, write_model
from gpu_plan import plan
from gpu_rollout import embedded_rollout
from gpu_sync import checksum, weight_sync
from gpu_training import memory, policy_update, sft
from gpu_vllm import vllm

from engines.collectives import close_process_group

PREPARE_DEADLINE_S = 120.0
CLEAN_UP_S = 5.0
LIMIT_S = {"cpu": 38.0}
DEFAULT_LIMIT_S = 240.0


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        needs_s: seconds that have to be left for it to start: on a GPU, and with a tiny model.
    """

    name: str
    measure: Measure
    needs_s: tuple[float, float]


MEASUREMENTS = (
    Row("sft", sft, (35, 1)),
    Row("policy_update", policy_update, (40, 1)),
    Row("memory", memory, (40, 1)),
    Row("weight_sync", weight_sync, (15, 1)),
    Row("embedded_rollout", embedded_rollout, (30, 1)),
    Row("checksum", checksum, (5, 1)),
    Row("plan", plan, (50, 1)),
    Row("vllm", vllm, (150, 90)),
)


@dataclass(frozen=True)
class Prepared:
    """What is known once a process has looked at the device and written the models."""

    stack: Stack
    dtype: str
    peak_flops_per_s: float | None


def main() -> int:
    """Measure and print; 1 if a measurement crashed."""
    start = time.monotonic()
    chosen = options()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as temporary:
        directory = Path(temporary)
        [prepared, *_] = in_a_process(
            lambda: iter([prepare(chosen, directory)]), "prepare", PREPARE_DEADLINE_S
        )
        if not isinstance(prepared, Prepared):
            raise SystemExit(f"gpu_bench: {prepared}")
        setup = setup_of(chosen, prepared, directory)
        limit_s = chosen.limit_s or LIMIT_S.get(setup.platform, DEFAULT_LIMIT_S)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        with chosen.out.open("w", encoding="utf-8") as out:
            out.write(prepared.stack.line() + "\n")
            print(prepared.stack.text(), flush=True)
            results = []
            for result in measured(setup, chosen.only, start + limit_s):
                results.append(result)
                out.write(result.line() + "\n")
                out.flush()
                print(result.line(), flush=True)
    print(f"\n{prepared.stack.text()} `make gpu-bench`, {time.monotonic() - start:.0f} s:\n")
    print(table(results))
    return int(any(isinstance(each, NotMeasured) and each.crashed for each in results))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in MEASUREMENTS]
    parser.add_argument("--device", default="auto", help="platform: auto, nvidia, cpu, ...")
    parser.add_argument("--tiny", action="store_true", help="the sizes of the CPU, on any device")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--limit-s", type=float, help="of all; 240, on a CPU 38")
    parser.add_argument("--repeats", type=int, help="turns that count; 3, tiny 1")
    parser.add_argument("--peak-tflops", type=float, help="of the device, where it is not known")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, help="of a step; 32, tiny 4")
    parser.add_argument("--group-size", type=int, help="answers to a prompt; 8, tiny 4")
    parser.add_argument("--prompt-length", type=int, help="tokens; 128, tiny 16")
    parser.add_argument("--max-new-tokens", type=int, help="tokens; 256, tiny 16")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_bench.jsonl")
    return parser.parse_args()


def setup_of(chosen: argparse.Namespace, prepared: Prepared, directory: Path) -> Setup:
    """The sizes: what was chosen, else those of the device."""
    is_tiny = chosen.tiny or prepared.stack.platform == "cpu"
    given = (chosen.prompts, chosen.group_size, chosen.prompt_length, chosen.max_new_tokens)
    defaults = (4, 4, 16, 16) if is_tiny else (32, 8, 128, 256)
    num_prompts, group_size, prompt_length, max_new_tokens = (
        size or default for size, default in zip(given, defaults, strict=True)
    )
    peak = chosen.peak_tflops * 1e12 if chosen.peak_tflops else prepared.peak_flops_per_s
    return Setup(
        platform=prepared.stack.platform,
        shape=SHAPES[shape_name(chosen, prepared.stack.platform)],
        hf_dir=directory / "model",
        narrow_hf_dir=directory / "narrow",
        dtype=prepared.dtype,
        peak_flops_per_s=peak,
        num_prompts=num_prompts,
        group_size=group_size,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        num_repeats=chosen.repeats or (1 if is_tiny else 3),
    )


def shape_name(chosen: argparse.Namespace, platform: str) -> str:
    """Of the model."""
    return chosen.shape or ("tiny" if chosen.tiny or platform == "cpu" else "qwen3-0.6b")


def prepare(chosen: argparse.Namespace, directory: Path) -> Prepared:
    """Open the device, write both models."""
    platform = opened(chosen.device)
    stack = stack_of(platform)
    name = shape_name(chosen, stack.platform)
    for place, shape in (("model", SHAPES[name]), ("narrow", SHAPES.get(f"{name}-narrow"))):
        write_model(directory / place, shape or SHAPES["tiny-narrow"], platform.device())
    dtype = chosen.dtype or ("float32" if platform.device_name == "cpu" else "bfloat16")
    return Prepared(stack, dtype, platform.peak_flops_per_s(dtype))


def measured(setup: Setup, names: Sequence[str], deadline: float) -> Iterator[Figure | NotMeasured]:
    """Every chosen measurement's figures, as they come."""
    is_tiny = setup.shape.num_weights < 1e7
    for row in MEASUREMENTS:
        left_s = deadline - time.monotonic()
        if row.name not in names:
            continue
        if left_s < row.needs_s[is_tiny]:
            reason = f"{max(left_s, 0):.0f} s were left, it needs {row.needs_s[is_tiny]:.0f}"
            yield NotMeasured(row.name, reason)
            continue
        for each in in_a_process(lambda row=row: row.measure(setup), row.name, left_s):
            assert isinstance(each, Figure | NotMeasured)
            has_no_goal = is_tiny and isinstance(each, Figure)
            yield replace(each, goal=None) if has_no_goal else each


def in_a_process(
    measure: Callable[[], Iterator[object]], name: str, limit_s: float
) -> Iterator[object]:
    """What a function yields in a fork of this process, and a `NotMeasured` if it ended badly.

    The fork leads a process group, which is ended as a whole.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile() as log:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_send_all, args=(measure, name, sender, log.fileno()))
        process.start()
        sender.close()
        try:
            yield from _received(receiver, name, time.monotonic() + limit_s)
        finally:
            process.join(CLEAN_UP_S)
            exit_code = process.exitcode  # None: it is still running, and is ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join(CLEAN_UP_S)
        if exit_code:
            log.seek(0)
            error = last_error(log.read().decode(errors="replace"))
            yield NotMeasured(name, f"exit code {exit_code}: {error}", crashed=True)


def last_error(log: str) -> str:
    """The last line that names an exception, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1][:300]


def _received(receiver: Connection, name: str, deadline: float) -> Iterator[object]:
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            yield receiver.recv()
        except EOFError:
            return
    yield NotMeasured(name, "ended at the time limit, with the figures above")


def _send_all(
    measure: Callable[[], Iterator[object]], name: str, sender: Connection, log: int
) -> None:
    """In the fork: what libraries print goes to the log."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w", buffering=1)
    try:
        for each in measure():
            sender.send(each)
    except NeedsError as error:
        sender.send(NotMeasured(name, f"needs {error}"))
    close_process_group()


if __name__ == "__main__":
    sys.exit(main())
