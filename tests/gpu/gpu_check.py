"""The GPU tests and a consistency run, a table row per check: `make gpu-check`.

On a GPU: `tests/gpu -m gpu`, in several processes if xdist is there, then `consistency.py`. Without
one, or with `--device cpu`: the CPU twins of the same tests; the tests that need a GPU are listed
as skipped, with what they need. Each part ends at the time limit of all.

Run: python tests/gpu/gpu_check.py [--device auto] [--limit-s 240] [--keyword EXPRESSION]
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MAX_NUM_PROCESSES = 8
CONSISTENCY_S = 60.0
"""Of the limit, what is kept for the second part."""
CLEAN_UP_S = 10.0
NO_TESTS = 5
"""pytest's exit code."""
ALONE = str(HERE / "test_free_memory.py")
"""Looks at the whole device."""
OF_COMMANDS = (str(HERE / "test_gpu_commands.py"), str(HERE / "pack"))
PARTS = (
    ((str(HERE), *(f"--ignore={path}" for path in (ALONE, *OF_COMMANDS))), True),
    ((ALONE,), False),
)
"""Arguments of pytest, and whether its tests may share the device."""


@dataclass(frozen=True)
class Row:
    """One line of the table: all cases of a test, or one check of the consistency run.

    Attributes:
        detail: why it failed or what it needs; else what was found.
    """

    check: str
    num_passed: int
    num_failed: int
    num_skipped: int
    seconds: float | None
    detail: str

    @property
    def verdict(self) -> str:
        """In one word."""
        if self.num_failed:
            return "FAILED"
        return "passed" if self.num_passed else "skipped"


def rows_of(report: Path) -> list[Row]:
    """Read pytest's JUnit report; the cases of one test function are one row."""
    cases: dict[str, list[ET.Element]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        module = (case.get("classname") or "").rpartition(".")[2]
        function = (case.get("name") or "").partition("[")[0]
        cases.setdefault(f"{module}::{function}" if function else module, []).append(case)
    return [_row(name, found) for name, found in cases.items()]


def _row(name: str, cases: Sequence[ET.Element]) -> Row:
    failed = [each for case in cases for kind in ("failure", "error") for each in case.iter(kind)]
    skipped = [each for case in cases for each in case.iter("skipped")]
    reasons = [each.get("message") or "" for each in failed or skipped]
    num_failed = sum(any(child.tag in {"failure", "error"} for child in case) for case in cases)
    return Row(
        name,
        len(cases) - num_failed - len(skipped),
        num_failed,
        len(skipped),
        sum(float(case.get("time") or 0) for case in cases),
        first_line(reasons),
    )


def first_line(texts: Iterable[str]) -> str:
    """Of the first text, short enough for a table."""
    line = next((text.strip().partition("\n")[0] for text in texts), "")
    return line.removeprefix("Skipped: ")[:160]


def consistency_rows(lines: Iterable[str]) -> list[Row]:
    """Of what `consistency.py` printed."""
    rows: list[Row] = []
    for line in lines:
        if line.startswith("{"):
            found = json.loads(line)
            sign = "at least" if found["at_least"] else "at most"
            detail = f"{found['value']:.3g}; {sign} {found['bound']:g}"
            passes = found["passes"]
            name = f"consistency: {found['name']}"
            rows.append(Row(name, int(passes), int(not passes), 0, None, detail))
    return rows


def ended(command: Sequence[str], limit_s: float, log: Path) -> int | None:
    """Exit code of a program that writes to a log; None if it was ended at the limit.

    It leads a process group, which is ended as a whole.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        try:
            return process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes its report
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(CLEAN_UP_S)


def rows_of_tests(
    selected: Sequence[str], *, is_cpu: bool, in_parallel: bool, limit_s: float, directory: Path
) -> list[Row]:
    """Run the tests that pytest's arguments select."""
    report, log = directory / "report.xml", directory / "pytest.log"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-m", "gpu or slow" if is_cpu else "gpu", "--junit-xml", str(report), *selected,
    ]  # fmt: skip
    if in_parallel and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(MAX_NUM_PROCESSES, os.cpu_count() or 1))]
    exit_code = ended(command, limit_s, log)
    rows = rows_of(report) if report.exists() else []
    if exit_code is None or (not rows and exit_code != NO_TESTS):
        rows.append(failure("tests/gpu", exit_code, log))
    return rows


def failure(part: str, exit_code: int | None, log: Path) -> Row:
    """Of a part that did not run to its end."""
    why = "ended at the time limit" if exit_code is None else f"exit code {exit_code}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return Row(part, 0, 1, 0, None, first_line([f"{why}: {' '.join(last)}"]))


def rows_of_consistency(device: str, limit_s: float, directory: Path) -> list[Row]:
    """Run the consistency checks."""
    log = directory / "consistency.log"
    command = [sys.executable, str(HERE / "consistency.py"), "--device", device]
    exit_code = ended(command, limit_s, log)
    rows = consistency_rows(log.read_text(errors="replace").splitlines())
    if exit_code != 0 and not any(row.num_failed for row in rows):
        rows.append(failure("consistency", exit_code, log))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| check | verdict | cases | seconds | found |", "| --- | --- | ---: | ---: | --- |"]
    for row in rows:
        num_run = row.num_passed + row.num_failed
        cases = f"{row.num_passed}/{num_run}" if num_run else ""
        cases += f" ({row.num_skipped} skipped)" if row.num_skipped else ""
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append(f"| {row.check} | {row.verdict} | {cases} | {seconds} | {row.detail} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table and a verdict; 1 if a check failed or none passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="platform: auto, nvidia, cpu, ...")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--keyword", default="", help="as pytest's -k; the consistency run stays")
    chosen = parser.parse_args()
    start = time.monotonic()
    from hardware.detection import detect

    platform, reason = detect(chosen.device)
    is_cpu = platform.device_name == "cpu"
    print(reason, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        directory = Path(temporary)
        deadline = start + chosen.limit_s
        rows: list[Row] = []
        for selected, in_parallel in PARTS:
            rows += rows_of_tests(
                [*selected, *(["-k", chosen.keyword] if chosen.keyword else [])],
                is_cpu=is_cpu,
                in_parallel=in_parallel and not is_cpu,
                limit_s=deadline - time.monotonic() - CONSISTENCY_S,
                directory=directory,
            )
        rows += rows_of_consistency(platform.name, deadline - time.monotonic(), directory)
    print(table(rows))
    num_failed = sum(row.num_failed for row in rows)
    num_passed = sum(row.num_passed for row in rows)
    num_skipped = sum(row.num_skipped for row in rows)
    print(
        f"\n{num_passed} passed, {num_failed} failed, {num_skipped} skipped on {platform.name}, "
        f"{time.monotonic() - start:.0f} s"
    )
    return int(num_failed > 0 or num_passed == 0)


if __name__ == "__main__":
    sys.exit(main())
