"""The guide to a flow of one's own, followed to the letter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import Home

from flows.local.local_run import load_own_flow
from flows.report.report import Report, plot_data
from infra.errors import ConfigError
from infra.store.storage import open_storage
from infra.tracking.journal import StageHistory

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


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "my_flow.py").write_text(code)
    return tmp_path / "my_flow.py"


def rlhf_flow(home: Home, file: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The guide's command, from a directory that is not the project's."""
    sets = [part for override in overrides for part in ("--set", override)]
    return subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "flow", file.name, *sets],
        cwd=file.parent, capture_output=True, text=True, timeout=600, env=home.environment,
    )  # fmt: skip


@pytest.mark.slow
def test_a_file_of_ones_own_chains_the_stages(flow_file: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    mistaken = rlhf_flow(home, flow_file, "data.arithmetic.num_stf=1")
    assert mistaken.returncode == 2, mistaken.stderr
    assert mistaken.stderr.startswith("data.arithmetic.num_stf: "), mistaken.stderr
    assert mistaken.stderr.count("\n") == 1
    first = rlhf_flow(home, flow_file, *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
    stages = sorted(stage.name for stage in (home.path / "store/stages").iterdir())
    assert len(stages) == 7, "preprocess, sft, two of preferences, evaluate and its two answers"
    again = rlhf_flow(home, flow_file, *TINY)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(stage.name for stage in (home.path / "store/stages").iterdir()) == stages
    (page,) = home.path.glob("runs/twice-*/report.json")
    report = Report.model_validate_json(page.read_bytes())
    assert str(page.with_name("report.md")) in first.stdout
    names = [stage.name for stage in report.stages]
    assert names == ["preprocess", "sft", "preference", "preference_2", "evaluate_preference"]
    history = StageHistory(open_storage(str(home.path / "store")))
    told = plot_data(report, history)
    assert {"preference", "preference_2"} <= told.seconds.keys()


@pytest.mark.slow
def test_a_flow_without_parameters_is_called_without_any(tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text("from prefect import flow\n\n@flow\ndef alone():\n    print('called')\n")
    ended = rlhf_flow(Home(tmp_path / "home"), file)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "called\n"


def test_deployment_of_the_flow_file_requires_no_parameter(flow_file: Path) -> None:
    flow = load_own_flow(f"{flow_file}:twice")
    assert not flow.parameters.required
    flow.validate_parameters({"overrides": ["seed=1"]})


@pytest.mark.parametrize(
    ("entrypoint", "problem"),
    [
        ("none.py", "FLOW: got 'none.py', which is no file"),
        ("two.py", "FLOW: got 'two.py'; its flows are: one, other; name one, as in two.py:my_flow"),
        ("two.py:third", "FLOW: got 'two.py:third'; its flows are: one, other; name one, as in"),
        ("nothing.py", "FLOW: got 'nothing.py'; its flows are: none; name one, as in"),
    ],
)
def test_a_flow_that_is_not_there_is_one_line(
    entrypoint: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("two.py").write_text(
        "from prefect import flow\n\n@flow\ndef one(): ...\n\n@flow\ndef other(): ...\n"
    )
    Path("nothing.py").write_text("")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_own_flow(entrypoint)
