"""Secrets of the environment, and a reward that does its best to write them down."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

pytestmark = pytest.mark.slow

SECRETS = {
    name: f"correct-horse-{number}-battery-staple"
    for number, name in enumerate(
        ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")
    )
}
REWARD = (
    f"""
SECRETS = {[*SECRETS]}
"""
    + """
import os, sys
import tempfile
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert not {*SECRETS} & {*os.environ}
    # What its own environment withholds stands in its parent's.
    job = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    sys.stderr.write("found " + job.decode(errors="replace").replace(chr(0), chr(10)) + chr(10))
    return float(solution_str.strip() == ground_truth)
"""
)


def test_no_secret_reaches_the_disk(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    home = Home(tmp_path / "run")
    home.environment |= SECRETS
    reward = tmp_path / "nosy.py"
    reward.write_text(REWARD)
    overrides = settings("sft=null", f"rl.reward.function={reward}:compute_score")
    printed = home.rlhf("run", *overrides)
    logs = [
        log
        for root in (home.path, *Path(tempfile.gettempdir()).glob("rlhf-ray-*"))
        for log in root.rglob("*")
        if log.is_file() and not log.is_symlink()
    ]
    texts = {log: log.read_bytes() for log in logs} | {Path("what it printed"): printed.encode()}
    assert any(b"found " in text for text in texts.values()), "the reward printed into some log"
    found = [
        (log, name)
        for log, text in texts.items()
        for name, secret in SECRETS.items()
        if secret.encode() in text
    ]
    record_property("F12", len(found))
    assert not found
