"""How deep a stage lies below the command that runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import RUN_DEADLINE_S, Home

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "engines", "hardware", "infra")
MAX_FILES = 12
LOOK = """
import json, sys, traceback
from pathlib import Path

def look(name):
    files = [Path(frame.filename) for frame in traceback.extract_stack()]
    own = [file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT)]
    found = [file.as_posix() for file in own if file.parts[0] in PACKAGES]
    Path(HERE, name).write_text(json.dumps(list(dict.fromkeys(found))))
"""
COMMAND = """
import infra.ray.api
from flows.commands.cli import main

ask = infra.ray.api.RayApi.call

def call(api, method, path, body=None, **options):
    if (method, path) == ("POST", "/api/jobs/"):
        look("submission")
        body = {**body, "entrypoint": body["entrypoint"].replace(
            "-P -m engines.jobs.preprocess", sys.argv[1] + " engines.jobs.preprocess")}
    return ask(api, method, path, body, **options)

infra.ray.api.RayApi.call = call
sys.exit(main(["run", *sys.argv[2:]]))
"""
JOB = """
import runpy
import engines.data.prepare.dataset

def build_dataset(*_):
    look("body")
    raise ValueError("seen enough")

engines.data.prepare.dataset.build_dataset = build_dataset
sys.argv = sys.argv[1:]
runpy.run_module("engines.jobs.preprocess", run_name="__main__", alter_sys=True)
"""


def test_few_files_lie_between_the_command_and_the_body_of_a_job(tmp_path: Path) -> None:
    """Those with a frame on the stack where a job is handed to Ray, and where its body works."""
    home = Home(tmp_path / "home")
    look = f"ROOT, PACKAGES, HERE = {str(ROOT)!r}, {PACKAGES!r}, {str(tmp_path)!r}\n{LOOK}"
    (tmp_path / "job.py").write_text(look + JOB)
    (tmp_path / "command.py").write_text(look + COMMAND)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "command.py"), str(tmp_path / "job.py"), str(home.recipe)],
        capture_output=True,
        text=True,
        env=home.environment,
        timeout=RUN_DEADLINE_S,
    )
    assert "seen enough" in ended.stderr
    above, below = (json.loads((tmp_path / name).read_text()) for name in ("submission", "body"))
    assert above[0] == "flows/commands/cli.py"
    assert "engines/jobs/preprocess.py" in below
    assert len({*above, *below}) <= MAX_FILES, [*above, *below]
