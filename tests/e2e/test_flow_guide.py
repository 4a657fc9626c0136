"""The guide to a flow of one's own, followed to the letter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import Home

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "chain-your-own-flow.md"
TINY = (
    "model.architecture={hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, "
    "head_dim: 16, intermediate_size: 64}",
    "data.arithmetic={num_sft: 64, num_rl: 64, num_eval: 16, num_preference: 16, "
    "num_preference_eval: 16}",
    "sft={num_steps: 3, batch_size_sequences: 8, target_loss: null}",
    "preference={num_steps: 2, batch_size_pairs: 4}",
    "sft.optimizer.num_warmup_steps=0",
    "preference.optimizer.num_warmup_steps=0",
    "evaluation.num_problems=16",
    "training.num_threads=1",
)


@pytest.mark.slow
def test_a_file_of_ones_own_chains_the_stages(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "my_flow.py").write_text(code)
    home = Home(tmp_path / "home")

    def run() -> str:
        ended = subprocess.run(
            [sys.executable, "my_flow.py", *TINY],
            cwd=tmp_path, capture_output=True, text=True, timeout=600,
            env={
                **home.environment,
                "PREFECT_HOME": str(tmp_path / "prefect"),
                "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
            },
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    first = run()
    logs = {path.name: path.read_text() for path in (home.path / "store/stages").glob("*/*")}
    assert logs
    stages = sorted(stage.name for stage in (home.path / "store/stages").iterdir())
    assert len(stages) == 7, "preprocess, sft, two of preferences, evaluate and its two answers"
    assert run() == first
    assert sorted(stage.name for stage in (home.path / "store/stages").iterdir()) == stages
    (report,) = home.path.glob("runs/*/report.json")
    assert report.read_text().count('"name": "preference"') == 2
