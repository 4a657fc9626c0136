"""The fault matrix: what may break, what is promised then, and the tests that break it.

A test is named after its row, `test_fault_row_17_...` or `test_fault_row_7_and_8_...`, wherever it
lies; `pytest -k fault_row_17_` runs those of one. `docs/reference/faults.md` is made from here.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"test_fault_row_(\d+(?:_and_\d+)*)_")
BAD_INPUT = re.compile(r"test_bad_input_row_(\d+(?:_and_\d+)*)_")
"""Of a test of a bad model, checkpoint, machine or service, in `tests/unit/test_bad_places.py`."""


class Row(NamedTuple):
    """One fault."""

    fault: str
    promise: str
    figures: tuple[str, ...] = ()
    """Keys of `figures.FIGURES`."""


ROWS = {
    1: Row(
        "SIGKILL at any storage call of a save, a publish, a commit",
        "a fresh process ends identically, without a person",
        ("F1",),
    ),
    2: Row(
        "SIGKILL at random times, many times in a row, of flow, driver, ranks and rollout",
        "weights, optimizer, random generators and cursor are bitwise those of an undisturbed "
        "run; every metric is there once",
        ("F2", "F3"),
    ),
    3: Row("SIGKILL of one rank of two", "the others end by their deadline, by name", ("F4",)),
    4: Row(
        "SIGSTOP of a rank or of a rollout engine, a phase that hangs",
        "noticed by its silence; stacks are written; replaced or failed",
        ("F4",),
    ),
    5: Row(
        "a rollout engine dies while it generates",
        "its samples are drawn again once, none counts twice, its heir serves the current weights",
    ),
    6: Row(
        "an engine's subprocess dies and the actor above it lives",
        "it is replaced, and no more often than allowed",
    ),
    7: Row(
        "a disk that is full during a save, a publish, a record",
        "one error that says so, the checkpoint before stays valid, work goes on with room",
    ),
    8: Row("EIO on any write, sync or read", "never published, never taken for an absence"),
    9: Row(
        "a flipped bit, a page of zeros, a file cut short, files that changed places",
        "refused with file and both digests; the checkpoint before is taken",
        ("F7",),
    ),
    10: Row(
        "power loss", "what has its name is durable: files, their directory, the name, its parent"
    ),
    11: Row(
        "NaN or an infinity in loss, gradient, reward or logprob of one rank",
        "no optimizer step on any rank, and no checkpoint of it",
        ("F6",),
    ),
    12: Row("a sync of weights that is left out", "found before a token of it is trained on"),
    13: Row("sampler and trainer drift apart", "told at each step; a bound stops the run"),
    14: Row(
        "a reward that hangs, raises, or returns NaN, None or a text",
        "that sample is unscored, the others are not",
    ),
    16: Row(
        "equal rewards, an empty group, nothing to train on",
        "no gradient or no step, counted, and never 0/0",
    ),
    17: Row(
        "SIGKILL of the Prefect worker or of a flow's process",
        "the run leaves Running by itself; its heir attaches to the living job",
    ),
    18: Row(
        "ten starts of one stage at once, a first attempt that wakes late",
        "one job, one output; the others attach, the late one is fenced",
        ("F10",),
    ),
    19: Row("the answer to a submission is lost", "one job, which is its submitter's"),
    20: Row(
        "cancel in any phase",
        "no process of the run after 30 s, not even in a session of its own",
        ("F5",),
    ),
    21: Row(
        "a tracking server that is down, answers 500, or whose database is locked",
        "no step waits for it; no metric is lost or doubled",
        ("F9",),
    ),
    22: Row(
        "a journal's writer is killed in mid-record, a run is resumed",
        "the torn tail is cut, the same run goes on and ends with the right status",
    ),
    23: Row("resources that never fit", "an error by the deadline: what was asked, what there is"),
    24: Row(
        "the kernel kills a job for its memory",
        "said with the exit code and memory as the likely cause; the stage is not tried again "
        "by itself",
    ),
    25: Row(
        "clocks that jump or differ",
        "durations never run backwards, no live process counts as dead",
    ),
    26: Row(
        "configuration or code changed behind a half-trained stage",
        "the plan names what differs and offers `--adopt`; nothing is continued unasked",
    ),
    27: Row(
        "a stage that another process works on",
        "attached to, not begun again; `rlhf status` names holder and host",
    ),
    28: Row(
        "an object store that answers 412, 409, 500, cuts connections, lists what was before",
        "nothing half is visible; what is asked again is done once",
    ),
    29: Row(
        "a home's first command is refused, told to end or killed, or its machine stops, while "
        "MLflow and Prefect make their tables",
        "the same command completes; MLflow holds every stage, Prefect the run; a database of "
        "MLflow that cannot be migrated is set aside, and refused if other programs wrote to it",
    ),
}
"""Number 15, programs that a model wrote, needs a sandbox, which the project does not have."""


class Proof(NamedTuple):
    """A test."""

    path: str
    name: str


def proofs(pattern: re.Pattern[str] = _NAME) -> dict[int, list[Proof]]:
    """The tests of each row, by file.

    Args:
        pattern: of their names, with the numbers of rows.
    """
    found: dict[int, list[Proof]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, rows in _named(path, pattern):
            for number in rows:
                found.setdefault(number, []).append(Proof(str(path.relative_to(TESTS)), name))
    return found


def page(figures: dict[str, str]) -> str:
    """The matrix in Markdown.

    Args:
        figures: what each figure counts.
    """
    lines = [
        "# Faults",
        "",
        "What is broken on purpose, what is promised then, and the tests that break it.",
        "`make faults` prints the figures; `pytest -k fault_row_17_` runs the tests of one row.",
        "",
        "| row | fault | promise | tests | figures |",
        "|---|---|---|---|---|",
    ]
    tests = proofs()
    for number, row in ROWS.items():
        shown = "<br>".join(f"`{each.path}`: {_words(each.name)}" for each in tests[number])
        lines.append(
            f"| {number} | {row.fault} | {row.promise} | {shown} | {', '.join(row.figures)} |"
        )
    lines += ["", "| figure | what |", "|---|---|"]
    lines += [f"| {name} | {what} |" for name, what in figures.items()]
    return "\n".join(lines) + "\n"


def _named(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, list[int]]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and (match := pattern.match(node.name)):
            yield node.name, [int(number) for number in match[1].split("_and_")]


def _words(name: str) -> str:
    return _NAME.sub("", name).replace("_", " ")
