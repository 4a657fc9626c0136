"""A recipe whose model learns nothing in seconds, and `rlhf` in a home directory of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from infra import env
from infra.host import servers

RECIPE = """
name: tiny
model:
  init: random
  architecture: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
                 intermediate_size: 64}
  max_length: 64
data:
  arithmetic: {num_digits: 2, num_sft: 64, num_rl: 64, num_eval: 16}
  max_prompt_length: 48
sft: {num_steps: 4, batch_size_sequences: 8, optimizer: {lr: 1.0e-3}}
rl:
  num_rounds: 1
  num_steps_per_round: 2
  batch_size_prompts: 4
  group_size: 4
  sampling: {max_new_tokens: 6}
  optimizer: {lr: 1.0e-3}
checkpoint: {every_num_steps: 5}
promote: {model_name: tiny, min_value: 0.0}
"""
RUN_DEADLINE_S = 600.0
_SETTINGS_OF = ("PREFECT_", "MLFLOW_", "RAY_", "RLHF_")


class Home:
    """A home directory, a recipe, and `rlhf` in it.

    Args:
        path: does not exist yet.
        recipe: name of one that ships with the project; None: the tiny one.
        deadline_s: of one command.
    """

    def __init__(
        self, path: Path, recipe: str | None = None, deadline_s: float = RUN_DEADLINE_S
    ) -> None:
        path.mkdir()
        self.path = path / "home"
        self.deadline_s = deadline_s
        self.recipe = recipe or path / "tiny.yaml"
        if recipe is None:
            (path / "tiny.yaml").write_text(RECIPE)
        # Settings of whoever runs the tests are not those of the test.
        foreign = {name: None for name in os.environ if name.startswith(_SETTINGS_OF)}
        self.environment = env.child_environment(
            **{**foreign, "RLHF_HOME": str(self.path), "COLUMNS": "200"}
        )

    def command(self, verb: str, *arguments: str) -> list[str]:
        """The command line of a verb that takes a recipe."""
        return [sys.executable, "-m", "flows.commands.cli", verb, str(self.recipe), *arguments]

    def start(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, however it ends."""
        return subprocess.run(
            self.command(verb, *arguments),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=self.deadline_s,
        )

    def rlhf(self, verb: str, *arguments: str) -> str:
        """What a command prints that has to end well."""
        ended = self.start(verb, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def report(self, printed: str) -> dict:
        """The report that a run printed the path of."""
        path = re.search(r"^report +(\S+)$", printed, re.M)
        assert path is not None, printed
        return json.loads(Path(path[1]).with_name("report.json").read_text())

    def values(self, metric: str) -> list[float]:
        """Of a metric, as the journals of all runs hold it, in the order of steps."""
        return [
            record["values"][metric]
            for file in (self.path / "store" / "work").rglob("*.jsonl")
            for record in map(json.loads, file.read_text().splitlines())
            if metric in record.get("values", {})
        ]

    def run(self, *overrides: str) -> dict:
        """The report of a run with these values of the recipe."""
        return self.report(self.rlhf("run", *settings(*overrides)))

    def processes(self) -> list[psutil.Process]:
        """What was started for this home: servers, Ray's processes, jobs, runs."""
        marks = {
            record.mark
            for name in servers.recorded(self.path)
            if (record := servers.load(self.path, name))
        }
        found = []
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            environ = process.info["environ"] or {}
            ours = environ.get("RLHF_HOME") == str(self.path)
            ours |= environ.get("RLHF_PROCESS_MARK") in marks
            ours |= str(self.path) in " ".join(process.info["cmdline"] or [])
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    @property
    def has_ray(self) -> bool:
        """Whether a cluster that was started here has not been ended."""
        return (self.path / "services" / "ray.json").exists()


def settings(*overrides: str) -> list[str]:
    """`--set` before each."""
    return [word for override in overrides for word in ("--set", override)]


def ran(report: dict) -> list[str]:
    """Stages that were not taken from an earlier run."""
    return [stage["name"] for stage in report["stages"] if not stage["reused"]]
