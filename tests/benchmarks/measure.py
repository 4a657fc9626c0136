"""What every benchmark here shares: the machine in words, medians with spread, and peers.

A peer is a program in an environment of its own. It is started once and answers requests over
its standard streams, so that ours and the peer can take turns within one run: a busy machine
then slows both.
"""

import argparse
import json
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import torch

from infra import env

ANSWER = "ANSWER "
HERE = Path(__file__).parent
PEER_PYTHON = HERE.parents[1] / ".venv-trl" / "bin" / "python"


@dataclass(frozen=True)
class Measurement:
    """Repeated measurements of one quantity.

    Attributes:
        values: in the order they were taken.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest minus smallest, over the median."""
        return (max(self.values) - min(self.values)) / self.median

    @property
    def interval(self) -> tuple[float, float]:
        """Around the median, by order statistics: all values, of seven and more without the ends.

        Of seven its level is ``1 - 2 * (1 + 7) / 2**7``, 87.5 %; a disturbed turn decides nothing.
        """
        inner = sorted(self.values)
        inner = inner[1:-1] if len(inner) >= 7 else inner
        return inner[0], inner[-1]

    def text(self, unit: str) -> str:
        return f"{self.median:,.4g} {unit} (spread {self.spread:.0%})"


def take_turns(
    candidates: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, Measurement]:
    """Measure every candidate once per repeat, in turn; an uncounted turn warms all up."""
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(-1, repeats):
        for name, measure in candidates.items():
            value = measure()
            if repeat >= 0:
                values[name].append(value)
    return {name: Measurement(tuple(taken)) for name, taken in values.items()}


def turn_by_turn(above: Measurement, below: Measurement) -> Measurement:
    """The ratio within each turn, which what else runs on the machine disturbs least."""
    return Measurement(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def ratio_line(what: str, ratio: Measurement, goal: float | None = None) -> str:
    """One line per ratio, for people and for grep.

    Args:
        what: is compared.
        ratio: of each turn.
        goal: what it is to be at least; missed if the whole interval is below. None: for
            information only.
    """
    lowest, highest = ratio.interval
    line = f"  {what}: ratio {ratio.median:.2f}"
    if len(ratio.values) > 1:
        line += f" ({lowest:.2f} to {highest:.2f}, {len(ratio.values)} turns)"
    if goal is None:
        return line
    verdict = _verdict(reached=ratio.median >= goal, missed=highest < goal)
    return f"{line}; goal {goal:g}: {verdict}"


def cost_line(what: str, cost: Measurement, goal: float) -> str:
    """One line per cost, which is to be at most its goal; with its spread over the turns."""
    lowest, highest = cost.interval
    verdict = _verdict(reached=cost.median <= goal, missed=lowest > goal)
    return (
        f"  {what}: {cost.median:.4g} ({lowest:.4g} to {highest:.4g}, {len(cost.values)} turns); "
        f"goal at most {goal:g}: {verdict}"
    )


def _verdict(*, reached: bool, missed: bool) -> str:
    return "reached" if reached else "MISSED" if missed else "open, it lies within the interval"


def machine() -> str:
    """The machine, its load, and the versions that decide the speed, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line for line in info.read_text(encoding="utf-8").splitlines() if "model name" in line
        ]
        model = names[0].partition(":")[2].strip() if names else model
    memory_gb = psutil.virtual_memory().total / 1e9
    load = psutil.getloadavg()[0]
    return (
        f"{model}, {psutil.cpu_count()} logical cores, {memory_gb:.0f} GB, load {load:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


class Peer:
    """A peer program that answers one request at a time.

    Args:
        python: the interpreter of its environment.
        script: the program, in this directory.
        num_threads: CPU threads it may use.
        deadline_s: longest wait for one answer, the start of the program included.
    """

    def __init__(self, python: Path, script: str, num_threads: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        threads = str(num_threads)
        self._process = subprocess.Popen(
            [str(python), "-u", str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env.child_environment(
                PYTHONPATH=None,
                OMP_NUM_THREADS=threads,
                MKL_NUM_THREADS=threads,
                HF_HUB_OFFLINE="1",
                HF_HUB_DISABLE_PROGRESS_BARS="1",
                HF_DATASETS_DISABLE_PROGRESS_BARS="1",
                TRANSFORMERS_VERBOSITY="error",
            ),
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, **request: object) -> dict[str, float]:
        """Send a request and return the peer's answer.

        Raises:
            RuntimeError: it died or missed the deadline.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._deadline_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        finally:
            timer.cancel()
        raise RuntimeError(f"the peer ended without an answer (deadline {self._deadline_s:g} s)")


def arguments(description: str, *, peer: bool) -> argparse.Namespace:
    """The options every benchmark takes; sets this process's threads.

    Args:
        description: first line of the help text.
        peer: also take `--peer-python`, and refuse to start without that environment.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=PEER_PYTHON,
        help="interpreter of the peer's environment",
    )
    chosen = parser.parse_args()
    if peer and not chosen.peer_python.is_file():
        parser.error(
            f"no {chosen.peer_python}: python3 -m venv .venv-trl && "
            ".venv-trl/bin/pip install -r tests/benchmarks/requirements-trl.txt"
        )
    torch.set_num_threads(chosen.threads)
    return chosen
