"""Evaluations as stages of their own, by the command: where they run, and what they cost."""

import shutil
from pathlib import Path

import pytest
from tiny_pipeline import Home, ran, settings

from infra.store.stage_log import LogEntry
from infra.store.storage import open_storage
from infra.tracking.journal import read_records

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("flows", "tasks", "engines", "hardware", "infra")
MADE_BY = {"evaluate_sft": "evaluate", "evaluate_rl_round_1": "evaluate", "evaluate": "merge"}
"""By evaluation, whose process runs it where two ranks train: their driver has no device."""


def num_training_steps(home: Home) -> int:
    """Steps that all attempts of all stages together have recorded."""
    journals = (home.path / "store" / "work").glob("*/attempt-*/journal.jsonl")
    records = [record for path in journals for record in read_records(path)[0]]
    return sum("training/global_step" in record.values for record in records)


def log_of(home: Home, report: dict, label: str) -> list[LogEntry]:
    """Who held and committed a stage of a run."""
    [stage] = [stage for stage in report["stages"] if stage["name"] == label]
    attempts = open_storage(str(home.path / "store")).attempts
    return [*attempts.entries(stage["fingerprint"])]


def digests(report: dict) -> dict[str, str]:
    return {stage["name"]: stage["digest"] for stage in report["stages"]}


@pytest.mark.stacks
def test_separate_evaluation_process_matches_with_ranks_and_lora(
    tmp_path: Path,
) -> None:
    """Forced, an evaluation is a job of its own; before, the merge's process ran the last one."""
    home = Home(tmp_path / "home")
    layout = settings("training.num_workers=2", "training.lora={rank: 4}")
    warm = home.report(home.rlhf("run", *layout))
    assert set(MADE_BY) < set(ran(warm)), "what this run's own job did is not reused"
    force = [word for label in MADE_BY for word in ("--force", label)]
    cold = home.report(home.rlhf("run", *layout, *force))
    assert ran(cold) == [*MADE_BY]
    assert digests(cold) == digests(warm)
    for label, maker in MADE_BY.items():
        jobs = [entry.holder.ray_job.partition("-")[0] for entry in log_of(home, cold, label)]
        assert jobs == [maker, maker, "evaluate", "evaluate"]


@pytest.mark.stacks
def test_failed_repaired_or_edited_evaluation_retrains_nothing(
    tmp_path: Path,
) -> None:
    tree, home = tmp_path / "tree", Home(tmp_path / "home")
    for floor in FLOORS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / floor, tree / floor, ignore=ignored)
    home.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    evaluation = tree / "engines" / "trainers" / "evaluation" / "evaluator.py"
    whole = evaluation.read_text()
    evaluation.write_text(whole.replace("def run(", "def walk("))
    failed = home.start("run")
    assert failed.returncode == 1
    assert "evaluate_sft: job sft-" in failed.stdout + failed.stderr
    assert num_training_steps(home) == 4
    evaluation.write_text(whole)
    repaired = home.report(home.rlhf("run"))
    assert ran(repaired)[:2] == ["evaluate_sft", "rl_round_1"]
    assert num_training_steps(home) == 6
    evaluation.write_text(f"{whole}\n# Edited.\n")
    edited = home.report(home.rlhf("run"))
    assert ran(edited) == [*MADE_BY]
    assert digests(edited) == digests(repaired)
    assert num_training_steps(home) == 6, "an edit of the evaluation executes no training step"
