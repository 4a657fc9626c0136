"""A run on a terminal and in a file: one line per step, and a table."""

import io

from rich.console import Console

from flows.local.local_run import TerminalDisplay, summary_table
from flows.report.report import StageReport
from infra.store.stage_spec import Artifact
from infra.tracking.journal import JournalRecord
from tasks.runner.run import StageResult


def show(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    display = TerminalDisplay(console)
    display.stage_started("sft", "f" * 64)
    display.message("sft", "submitted sft-ffff-a0")
    display.record("sft", JournalRecord(kind="metrics", time_ms=1, step=1, values={"loss": 1.0}))
    display.record(
        "sft",
        JournalRecord(kind="progress", time_ms=1, done=1, total=2, message="step 1/2  [loss] 1.0"),
    )
    display.record("sft", JournalRecord(kind="log", time_ms=1, message="accuracy 50.0%"))
    display.stage_finished(
        StageResult(
            label="sft",
            fingerprint="f" * 64,
            artifact=Artifact(kind="policy", uri="/x", digest="d" * 64),
            reused=False,
            wall_s=1.25,
            metrics={"accuracy": 0.5},
            job_seconds={},
        )
    )
    display.close()
    return out.getvalue()


def test_a_file_gets_plain_lines() -> None:
    assert show(terminal=False).splitlines() == [
        "                sft  submitted sft-ffff-a0",
        "                sft  step 1/2  [loss] 1.0",
        "                sft  accuracy 50.0%",
        "                sft  ran in 1.2 s, digest dddddddddddd, accuracy 50.0%",
    ]


def test_a_terminal_gets_a_bar_as_well() -> None:
    shown = show(terminal=True)
    assert "step 1/2  [loss] 1.0" in shown
    assert "1/2" in shown
    assert "ran in 1.2 s" in shown


def test_the_table_has_a_row_per_stage() -> None:
    stage = StageReport(
        name="promote",
        reused=True,
        seconds=0.04,
        digest="e" * 64,
        fingerprint="f" * 64,
        metrics={"accuracy": 0.93, "promoted": 1.0, "gain": 0.05, "gain_margin": 0.02},
        job_seconds={},
    )
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table([stage]))
    row = out.getvalue().splitlines()[-1]
    assert [part.strip() for part in row.split("│")] == [
        "promote",
        "reused",
        "0.0",
        "eeeeeeeeeeee",
        "promoted, gain +0.05, chance 0.02",
    ]
