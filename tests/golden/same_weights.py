"""Whether two commits train the same weights: quickstart's SFT and its first round, by digest.

    python tests/golden/same_weights.py BEFORE AFTER

Each commit is checked out beside this tree and runs the whole way (`rlhf run`) in a home of its
own, with this Python. What is compared is every tensor of every policy, bitwise; a file's header
may name other things. Takes some minutes for each commit.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from infra import env

ROOT = Path(__file__).resolve().parents[2]
ROUND = ["--set", "rl.num_rounds=1"]
DEADLINE_S = 3600.0
_SETTINGS_OF = ("PREFECT_", "MLFLOW_", "RAY_", "RLHF_")


def policies(commit: str, work: Path) -> Mapping[str, str]:
    """Digest of the weights of each policy that a commit trains.

    Args:
        commit: any name of one.
        work: an empty directory.

    Returns:
        By stage: `sft`, `rl_round`.

    Raises:
        RuntimeError: the run failed.
    """
    tree = work / "tree"
    _git("worktree", "add", "--detach", str(tree), commit)
    try:
        _run_quickstart(tree, work / "home")
    finally:
        _git("worktree", "remove", "--force", str(tree))
    artifacts = (work / "home" / "store" / "artifacts" / "policy").iterdir()
    return {_stage_of(policy): weights_digest(policy / "checkpoint") for policy in artifacts}


def weights_digest(checkpoint: Path) -> str:
    """Of every model tensor's name, type, shape and bytes, in the order of names."""
    found: dict[str, str] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  no mapping
                tensor = tensors.get_tensor(name)
                content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                said = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                found[f"{file.name} {name}"] = hashlib.sha256(said + content).hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _stage_of(policy: Path) -> str:
    return json.loads((policy / "trainer.json").read_text())["stage"]


def _run_quickstart(tree: Path, home: Path) -> None:
    settings = {"RLHF_HOME": str(home), "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "run", "quickstart", *ROUND],
        env=env.child_environment(**_nothing_foreign(), **settings),
        cwd=tree,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"the run in {tree} ended with {ended.returncode}")


def _nothing_foreign() -> dict[str, None]:
    return {name: None for name in env.child_environment() if name.startswith(_SETTINGS_OF)}


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True, timeout=60)


def main() -> int:
    """Exit code 1 where any weight differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = {}
        for commit in (args.before, args.after):
            (Path(work) / commit).mkdir()
            found[commit] = policies(commit, Path(work) / commit)
    for stage in sorted(found[args.before]):
        digests = [found[commit].get(stage, "none") for commit in (args.before, args.after)]
        print(f"{stage:10} {digests[0]} {'==' if digests[0] == digests[1] else '!='} {digests[1]}")
    return int(found[args.before] != found[args.after])


if __name__ == "__main__":
    sys.exit(main())
