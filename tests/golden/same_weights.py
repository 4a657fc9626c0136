"""Whether two commits compute the same: each case as a whole run at both, compared bitwise.

    python tests/golden/same_weights.py BEFORE AFTER [CASE ...]

Each commit is checked out beside this tree and runs each case (`rlhf run`) in a home of its own,
with this Python. Of every stage are compared:

- weights, moments and random state of what it trained, by tensor: a file's header may name other
  things;
- the metrics of each step in its journal, but those that measure the machine; a metric that only
  AFTER has is no difference;
- rows and summaries of its evaluations, and the answers that they judged, by digest.

Takes a minute or two for each case at each commit.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from infra import env

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 1800.0
LORA = "training.lora={rank: 8, alpha: 8}"
FEW_STEPS = ("sft.num_steps=40", "sft.target_loss=null", "promote.min_value=0")
REWARD = Path(__file__).with_name("digits_right.py")
ONE_ROUND = (
    *FEW_STEPS,
    f"rl.reward.function={REWARD}:compute_score",
    "rl.num_rounds=1",
    "rl.num_steps_per_round=6",
    "rl.optimizer.num_warmup_steps=2",
    "rl.mini_batch_size_prompts=32",
)
PAIRS = ("preference.num_steps=12", "preference.held_out_every_num_steps=4")
TWO_RANKS = ("training.num_workers=2", "training.num_threads=1")
CRITIC = ("rl.critic.num_warmup_steps=1", "rl.batch_size_prompts=256")
CASES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("quickstart", *ONE_ROUND),
    "ppo with a critic and LoRA": ("ppo", *ONE_ROUND, *CRITIC, LORA),
    "dpo": ("dpo", *FEW_STEPS, *PAIRS),
    "grpo on two ranks of fsdp2": ("quickstart", *ONE_ROUND, *TWO_RANKS),
    "grpo on megatron": ("quickstart", *ONE_ROUND, "training.backend=megatron"),
}
"""A recipe and what is set in it; each begins with preprocessing and SFT."""
COMPARED_WHOLE = ("dataset", "model", "evaluation", "answers")
"""Kinds of artifacts in which every byte counts."""
OF_THE_MACHINE = ("timing_s/", "perf/", "memory/")
"""Beginnings of the names of metrics that differ from run to run."""
_SETTINGS_OF = ("PREFECT_", "MLFLOW_", "RAY_", "RLHF_")


@dataclass
class Computed:
    """What a run computed, each thing by a name that the same run of another commit has too."""

    digests: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def differences(self, after: "Computed") -> list[str]:
        """Names of what differs, or is at one of the two commits only."""
        names = sorted(self.digests.keys() | after.digests.keys())
        found = [name for name in names if self.digests.get(name) != after.digests.get(name)]
        return found + [
            name for name, steps in self.metrics.items() if after.metrics.get(name) != steps
        ]


def computed(home: Path) -> Computed:
    """Read what a finished run left in its store.

    Args:
        home: of a run that is the only one there.
    """
    found, store = Computed(), home / "store"
    counted: Counter[str] = Counter()
    for record in commits(store):
        artifact = record["artifact"]
        counted[record["stage"]] += 1
        stage = f"{record['stage']} {counted[record['stage']]}"
        directory = store / "artifacts" / artifact["kind"] / artifact["digest"]
        if artifact["kind"] in COMPARED_WHOLE:
            found.digests[f"{stage}: {artifact['kind']}"] = artifact["digest"]
        for part, digest in tensor_digests(directory).items():
            found.digests[f"{stage}: {part}"] = digest
        for name, steps in metrics(store / "work" / record["fingerprint"]).items():
            found.metrics[f"{stage}: metric {name}"] = steps
    return found


def commits(store: Path) -> list[dict[str, Any]]:
    """Each stage's commit record, in the order in which they were made."""
    entries = [
        json.loads(path.read_text(encoding="utf-8")) for path in store.glob("stages/*/[0-9]*")
    ]
    made = [entry for entry in entries if entry["kind"] == "committed"]
    return [entry["record"] for entry in sorted(made, key=lambda entry: entry["made_at"])]


def tensor_digests(directory: Path) -> dict[str, str]:
    """Of all tensors of an artifact: names, types, shapes and bytes, by what they are."""
    lines: dict[str, list[str]] = {}
    for file in sorted(directory.rglob("*.safetensors")):
        place = file.relative_to(directory)
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                said = f"{place} {name} {tensor.dtype} {tuple(tensor.shape)}"
                line = f"{said} {hashlib.sha256(content).hexdigest()}"
                lines.setdefault(_part(place, name), []).append(line)
    return {
        part: hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
        for part, found in lines.items()
    }


def _part(place: Path, name: str) -> str:
    if "rng" in place.parts:
        return "random state"
    role = next((part for part in place.parts if part in ("critic", "adapter")), "policy")
    return f"{role} {'moments' if name.startswith('optimizer.') else 'weights'}"


def metrics(work: Path) -> dict[str, list[tuple[int, str]]]:
    """Each metric of a stage's journal: step and value, as text, so that NaN equals itself."""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in _journal_lines(work):
        if line["kind"] == "metrics":
            for name, value in line["values"].items():
                if not name.startswith(OF_THE_MACHINE):
                    found.setdefault(name, []).append((line["step"], repr(value)))
    return found


def _journal_lines(work: Path) -> Iterator[dict[str, Any]]:
    for journal in sorted(work.glob("attempt-*/journal.jsonl")):
        for line in journal.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def run_cases(commit: str, cases: Sequence[str], work: Path) -> dict[str, Computed]:
    """Run cases at a commit.

    Args:
        commit: any name of one.
        cases: names of `CASES`.
        work: an empty directory.

    Raises:
        RuntimeError: a run failed.
    """
    tree = work / "tree"
    _git("worktree", "add", "--detach", str(tree), commit)
    try:
        return {case: _run(tree, work / f"home-{i}", case) for i, case in enumerate(cases)}
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _run(tree: Path, home: Path, case: str) -> Computed:
    recipe, *values = CASES[case]
    overrides = [argument for value in values for argument in ("--set", value)]
    settings = {"RLHF_HOME": str(home), "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "run", recipe, *overrides],
        env=env.child_environment(**_nothing_foreign(), **settings),
        cwd=tree,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{case}: the run in {tree} ended with {ended.returncode}")
    return computed(home)


def _nothing_foreign() -> dict[str, None]:
    return {name: None for name in env.child_environment() if name.startswith(_SETTINGS_OF)}


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True, timeout=60)


def main() -> int:
    """Exit code 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    args = parser.parse_args()
    cases = args.cases or list(CASES)
    with tempfile.TemporaryDirectory() as work:
        found = []
        for number, commit in enumerate((args.before, args.after)):
            place = Path(work) / str(number)
            place.mkdir()
            found.append(run_cases(commit, cases, place))
    differs = False
    for case in cases:
        before, after = (each[case] for each in found)
        different = before.differences(after)
        differs |= bool(different)
        print(f"{case}: {len(before.digests)} digests, {len(before.metrics)} metrics, "
              f"{len(different)} differ")  # fmt: skip
        for name in different:
            print(f"  {name}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
