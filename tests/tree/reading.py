"""How much code a reader follows for a question, from traces of calls at two commits.

    python tests/tree/reading.py [--before COMMIT] [--files] [QUESTION ...]

Each question is a window of a run of a tiny recipe: the second step of a round of GRPO with the
embedded engine; a stage that is followed to its end, one that is reused, and the job of one that
goes on from a step checkpoint; the first weights on their way to vLLM in a process of its own; a
recipe from the command line to its first job. Both commits run in checkouts of their own, with this
Python. `sync` needs the job environment of vLLM (`make env-vllm`).

Printed are distinct files, functions with a name and executed lines; distinct returns from a
function to another file; and climbs: how often a recipe is given to a directory that had it before
and gave it to another one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "b916653"
DEADLINE_S = 900.0
RECIPE_NAME = "tiny"
RECIPE = f"""
name: {RECIPE_NAME}
model:
  init: random
  architecture: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
                 intermediate_size: 64}}
  max_length: 64
data:
  arithmetic: {{num_digits: 2, num_sft: 64, num_rl: 64, num_eval: 16}}
  max_prompt_length: 48
sft: {{num_steps: 4, batch_size_sequences: 8, optimizer: {{lr: 1.0e-3}}}}
rl:
  num_rounds: 1
  num_steps_per_round: 3
  batch_size_prompts: 4
  group_size: 4
  sampling: {{max_new_tokens: 6}}
  optimizer: {{lr: 1.0e-3}}
checkpoint: {{every_num_steps: 2}}
promote: {{model_name: tiny, min_value: 0.0}}
"""
RUN_STAGE = ["tasks/runner/stage.py", "run"]
WINDOWS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "step": [{"begins": ["engines/trainers/rl.py", "step", "_train_step"], "occurrence": 2}],
    "followed": [{"begins": RUN_STAGE, "occurrence": 2}],
    "reused": [{"begins": RUN_STAGE, "occurrence": 2}],
    "resumed": [
        {
            "begins": ["engines/jobs/process/runtime.py", "run_job"],
            "occurrence": 1,
            "until": ["engines/training/base.py", "train_batch"],
        }
    ],
    "sync": [
        {"begins": ["engines/rollout/publishing.py", "publish"], "occurrence": 1},
        {
            "begins": ["engines/rollout/served/engine.py", "update_weights"],
            "occurrence": 1,
            "until": ["engines/rollout/served/engine.py", "generate"],
        },
        {
            "begins": ["engines/rollout/vllm/worker_extension.py", "receive_weights"],
            "occurrence": 1,
        },
    ],
    "recipe": [
        {
            "begins": ["flows/commands/cli.py", "main"],
            "occurrence": 1,
            "until": ["infra/ray/jobs.py", "submit"],
        }
    ],
}
"""Windows of each question; of a window with an end, only what reached it counts."""
LONGER_ROUND = ("--set", "rl.num_steps_per_round=5")
ON_VLLM = (
    *("--set", "rollout.engine=vllm", "--set", "rollout.placement=disaggregated"),
    *("--set", "model.architecture.head_dim=32"),
)


@dataclass(frozen=True)
class TracedRun:
    """A run of the recipe, one of several of a home, and the questions that it answers.

    `fault` ends a job of the run at a point of `infra.faults`, so the run fails.
    """

    home: str
    questions: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    fault: str = ""


RUNS = (
    TracedRun("plain", ("step", "followed", "recipe")),
    TracedRun("plain", ("reused",)),
    TracedRun("plain", (), LONGER_ROUND, "journal.before_write=kill@5"),
    TracedRun("plain", ("resumed",), LONGER_ROUND),
    TracedRun("vllm", ("sync",), ON_VLLM),
)


@dataclass(frozen=True)
class Reading:
    """What a question asks a reader to follow; all counts are of distinct things but `climbs`."""

    num_files: int
    num_functions: int
    num_lines: int
    num_returns: int
    num_climbs: int
    lines_of_file: Mapping[str, int]

    @staticmethod
    def of(windows: Sequence[Mapping[str, Any]]) -> "Reading":
        """Of all windows of a question, in whatever process they were."""
        functions = {tuple(each) for window in windows for each in window["functions"]}
        rooms = [room for window in windows for room in window["recipe_rooms"]]
        seen, climbs = set[str](), 0
        for room in rooms:
            climbs += room in seen
            seen.add(room)
        lines = {tuple(line) for window in windows for line in window["lines"]}
        return Reading(
            len({file for file, _ in lines}),
            len(functions),
            len(lines),
            len({tuple(each) for window in windows for each in window["returns"]}),
            climbs,
            Counter(file for file, _ in lines),
        )


@contextmanager
def checkout(commit: str, directory: Path) -> Iterator[Path]:
    """A worktree of a commit."""
    tree = directory / f"tree-{commit}"
    run = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*run, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*run, "remove", "--force", str(tree)], check=True)


def traced(run: TracedRun, tree: Path, out: Path, asked: Sequence[str]) -> None:
    """Run the tiny recipe, and write the windows of the questions asked to `out`."""
    windows = [
        {"question": question, "until": None, **window}
        for question in run.questions
        if question in asked
        for window in WINDOWS[question]
    ]
    recipe = out.parent / "tiny.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    settings = {
        "PYTHONPATH": f"{Path(__file__).parent / 'call_trace'}:{tree}",
        "PYTHONSAFEPATH": "1",
        "RLHF_HOME": str(out.parent / f"{run.home}-{tree.name}"),
        "RLHF_FAULTS": run.fault,
        "READING_OUT": str(out),
        "READING_ROOT": f"{tree}/",
        "READING_RECIPE": RECIPE_NAME,
        "READING_WINDOWS": json.dumps(windows),
    }
    command = [sys.executable, "-m", "flows.commands.cli", "run", str(recipe), *run.settings]
    ended = subprocess.run(command, cwd=tree, env={**os.environ, **settings}, timeout=DEADLINE_S)
    if (ended.returncode != 0) is not bool(run.fault):
        raise SystemExit(f"{' '.join(command)}: ended with {ended.returncode}")


def readings(tree: Path, directory: Path, questions: Sequence[str]) -> dict[str, Reading]:
    """Answer questions at a checkout."""
    (tree / ".envs").symlink_to(ROOT / ".envs")
    out = directory / f"out-{tree.name}"
    out.mkdir()
    last = max(RUNS.index(run) for run in RUNS if set(run.questions) & set(questions))
    homes = {run.home for run in RUNS if set(run.questions) & set(questions)}
    for run in RUNS[: last + 1]:
        if run.home in homes:
            traced(run, tree, out, questions)
    found: dict[str, list[Mapping[str, Any]]] = {each: [] for each in questions}
    for path in sorted(out.glob("*.json")):
        window = json.loads(path.read_text(encoding="utf-8"))
        found[window["question"]].append(window)
    return {question: Reading.of(windows) for question, windows in found.items()}


def main() -> None:
    """Print a table of both commits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("questions", nargs="*", default=list(WINDOWS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = {}
        for commit in (asked.before, "HEAD"):
            with checkout(commit, directory) as tree:
                found[commit] = readings(tree, directory, asked.questions)
    print(f"{'question':<10} {'commit':<10} files functions lines returns climbs")  # noqa: T201
    for question in asked.questions:
        for commit, of_commit in found.items():
            got = of_commit[question]
            print(  # noqa: T201
                f"{question:<10} {commit:<10} {got.num_files:>5} {got.num_functions:>9} "
                f"{got.num_lines:>5} {got.num_returns:>7} {got.num_climbs:>6}"
            )
        if asked.files:
            for file, num_lines in sorted(found["HEAD"][question].lines_of_file.items()):
                print(f"{num_lines:>10} {file}")  # noqa: T201


if __name__ == "__main__":
    main()
