"""An edit in the middle of a stage: the work before it is adopted, by the command and for real."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home, ran, settings

from infra.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "flows", "hardware", "infra", "tasks")
NUM_STEPS = 200
RECIPE = settings(f"sft.num_steps={NUM_STEPS}", "checkpoint.every_num_steps=5")
EDITED = "engines.trainers.supervised.trainer"


def shown_steps(printed: str) -> list[int]:
    """Steps of SFT that a run saw being computed."""
    return [int(step) for step in re.findall(rf"sft  step (\d+)/{NUM_STEPS}", printed)]


def half_train(home: Home, out: Path) -> None:
    """Interrupt SFT once it has a checkpoint; its job ends with the run."""
    with out.open("w") as file:
        process = subprocess.Popen(
            home.command("run", *RECIPE), stdout=file, stderr=file, env=home.environment
        )

    def is_half_trained() -> bool:
        assert process.poll() is None, out.read_text()
        return max(shown_steps(out.read_text()), default=0) >= 12

    wait_for(is_half_trained, "a checkpoint of SFT", RUN_DEADLINE_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, out.read_text()


@pytest.mark.stacks
@pytest.mark.parametrize("num_workers", [1, 2])
def test_fault_row_26_partial_training_continues_after_an_edit(
    tmp_path: Path, num_workers: int
) -> None:
    home = Home(tmp_path / "edited")
    tree = tmp_path / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package)
    home.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    half_train(home, tmp_path / "out")
    with (tree / "engines/trainers/supervised/trainer.py").open("a") as file:
        file.write("\n# An edit.\n")
    layout = [*RECIPE, *settings(f"training.num_workers={num_workers}")]

    refused = home.start("run", *layout, *settings("sft.optimizer.lr=0.5"), "--adopt", "sft")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith("sft.optimizer.lr: got 0.5; need 0.001, with which step ")

    plan = json.loads(home.rlhf("plan", "--json", *layout))
    offer = next(stage["adoption"] for stage in plan["stages"] if stage["label"] == "sft")
    adopted = re.match(r"step (\d+) of ([0-9a-f]{12}) can be adopted with --adopt sft, ", offer)
    assert adopted is not None, offer
    assert EDITED in offer
    assert num_workers == 1 or "training.num_workers 1 -> 2" in offer
    step = int(adopted[1])
    assert step >= 10

    printed = home.rlhf("run", *layout, "--adopt", "sft")
    assert shown_steps(printed) == list(range(step + 1, NUM_STEPS + 1))
    report = home.report(printed)
    assert ran(report)[0] == "sft"
    sft = next(stage for stage in report["stages"] if stage["name"] == "sft")
    assert sft["adopted"]["fingerprint"].startswith(adopted[2])
    assert sft["adopted"]["step"] == step
    assert EDITED in sft["adopted"]["differs"]
    page = (home.path / "runs" / report["run"] / "report.md").read_text()
    assert f"`sft` adopted step {step} of {adopted[2]}, which differs in " in page
    assert lineage(home, sft["fingerprint"]) == (sft["adopted"]["fingerprint"], NUM_STEPS)

    again = home.rlhf("run", *layout)
    assert home.report(again) == report, "it stands"
    standing = json.loads(home.rlhf("plan", "--json", *layout))["stages"][1]
    assert standing["status"] == "hit"
    assert standing["adoption"].startswith(f"adopted step {step} of {adopted[2]}")


def lineage(home: Home, fingerprint: str) -> tuple[str, int]:
    """Of a stage in MLflow: whose work it adopted, and how many steps its loss has, each once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{home.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    runs = client.search_runs(
        [experiment.experiment_id], f"tags.`rlhf.fingerprint` = '{fingerprint}'"
    )
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    steps = [metric.step for metric in history]
    assert sorted(steps) == sorted(set(steps))
    return runs[0].data.tags["rlhf.adopted.fingerprint"], len(steps)
