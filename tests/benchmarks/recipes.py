"""Do the CPU recipes improve their start? `python tests/benchmarks/recipes.py [names]`.

Each run is `rlhf run <recipe> --seed <seed>` in one home, so that what recipes share is computed
once. The start is the policy after SFT, the end is the merged model, both greedy on the same
held-out problems. Of a critic the table has the share of the outcome's variance that its values
explain, ``1 - var(R - V) / var(R)`` over the answer tokens of a step's batch, which it has not been
trained on yet: the median over the steps behind its warm-up. A finished run is kept as JSON below
`<home>/results`, by the name of the run: the next call goes on where this one stopped, and a
changed recipe is run again.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measure import machine
from paired_gain import CONFIDENCE, NUM_DRAWS, PairedVerdicts, paired_gain

from flows.recipe.recipe import load_recipe
from infra import env

ROOT = Path(__file__).resolve().parents[2]
RECIPES = (
    "ppo", "grpo", "dr_grpo", "dapo", "vapo", "gspo", "rloo", "reinforce_plus_plus", "remax",
    "pf_ppo", "lora_grpo", "rejection_sampling", "spin", "rm_ppo",
)  # fmt: skip
MAX_WALL_S = 240.0
"""What a recipe may take on two otherwise idle cores."""
MIN_EXPLAINED = {"ppo": 0.5}
"""Share of the variance that a critic has to explain."""
EXPLAINED = "critic/vf_explained_var"
DEADLINE_S = 3600.0
HEADINGS = (
    "recipe", "seeds", "problems", "start", "end", f"gain ({CONFIDENCE:.0%} interval)",
    "worse seeds", "critic explains", "longest run, s", "commit", "holds",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
        recipe: its name.
        seed: of the run.
        commit: of this project, with `+` where files had changed.
        wall_s: of the whole command, and of the stages that it reused when they were run.
        reused: labels of stages that another run had finished.
        before: verdict of each problem, of the start.
        after: of the end.
        explained: by a critic, of each step behind its warm-up.
    """

    recipe: str
    seed: int
    commit: str
    wall_s: float
    reused: tuple[str, ...]
    before: tuple[bool, ...]
    after: tuple[bool, ...]
    explained: tuple[float, ...] = ()

    @property
    def verdicts(self) -> PairedVerdicts:
        """As the statistics take them."""
        return PairedVerdicts(self.before, self.after)


def main() -> int:
    """Run what is missing and print the table; 1 if a recipe does not hold what it must."""
    parser = argparse.ArgumentParser(
        description="Run the CPU recipes and compare with their start."
    )
    parser.add_argument("names", nargs="*", metavar="recipe", help=", ".join(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--home", type=Path, default=ROOT / ".rlhf" / "recipes")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", dest="changes")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in RECIPES]
    if unknown:
        parser.error(f"got {unknown[0]!r}; need some of {', '.join(RECIPES)}")
    home = chosen.home.resolve()
    print(machine(), flush=True)
    rows, complete = [], True
    for name in chosen.names or RECIPES:
        results = []
        for seed in chosen.seeds:
            result = kept_result(home, name, seed, chosen.changes)
            if result is None and not chosen.only_table:
                result = run_recipe(home, name, seed, chosen.changes)
            if result is not None:
                results.append(result)
                print(line_of(result), flush=True)
        complete &= len(results) == len(chosen.seeds)
        if results:
            rows.append(row_of(results))
    print("\n" + table_of(rows))
    return int(not complete or any(row[-1] != "yes" for row in rows))


def result_path(home: Path, name: str, seed: int, changes: Sequence[str] = ()) -> Path:
    """Where a result is kept; the run's name has a digest of the recipe with its changes."""
    return home / "results" / f"{load_recipe(name, changes, seed=seed).run_name}.json"


def kept_result(home: Path, name: str, seed: int, changes: Sequence[str] = ()) -> Result | None:
    """The result of an earlier call; None where the recipe, as it is now, was not run."""
    path = result_path(home, name, seed, changes)
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Result(**{**values, **lists})


def run_recipe(home: Path, name: str, seed: int, changes: Sequence[str] = ()) -> Result:
    """Run one recipe to its end and keep the result; as `finished`."""
    path, commit = result_path(home, name, seed, changes), commit_now()
    report, wall_s = finished(home, name, seed, changes)
    result = result_of(home, report, name, commit, wall_s)
    path.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    return result


def finished(
    home: Path, name: str, seed: int, changes: Sequence[str] = ()
) -> tuple[dict[str, Any], float]:
    """Run one recipe to its end.

    Args:
        home: where runs and results are kept.
        name: of a recipe that ships.
        seed: of the run.
        changes: `key=value`, of the recipe.

    Returns:
        `report.json` of the run, and the seconds that the command took.

    Raises:
        RuntimeError: the run did not reach its end; names its log.
    """
    log = result_path(home, name, seed, changes).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    before = time.monotonic()
    command = ["run", name, "--seed", str(seed)]
    command += [word for change in changes for word in ("--set", change)]
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", "flows.commands.cli", *command],
            cwd=ROOT,
            env=env.child_environment(RLHF_HOME=str(home)),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,  # a model below its gate is a result, too
        )
    path = report_path(log)
    if path is None:
        raise RuntimeError(f"{name}, seed {seed}: no report; see {log}")
    return json.loads(path.read_text(encoding="utf-8")), time.monotonic() - before


def report_path(log: Path) -> Path | None:
    """The report that a run names at its end; one that reused every stage may be an older one."""
    named = re.findall(r"^report +(/.+)/report\.md$", log.read_text(encoding="utf-8"), re.MULTILINE)
    return Path(named[-1]) / "report.json" if named else None


def result_of(home: Path, report: dict, name: str, commit: str, wall_s: float) -> Result:
    """Compare the start and the end of a run, problem by problem.

    Args:
        home: of the run.
        report: `report.json` of the run.
        name: of the recipe.
        commit: that it ran at.
        wall_s: what the command took.

    Returns:
        The result.

    Raises:
        ValueError: start and end were not evaluated on the same problems.
    """
    digests = {stage["name"]: stage["digest"] for stage in report["stages"]}
    start, end = (evaluation_rows(home, digests[label]) for label in ("evaluate_sft", "evaluate"))
    if [row[:2] for row in start] != [row[:2] for row in end]:
        raise ValueError(f"{name}: start and end were evaluated on different problems")
    reused = [stage for stage in report["stages"] if stage["reused"]]
    return Result(
        recipe=name,
        seed=report["seed"],
        commit=commit,
        wall_s=round(wall_s + sum(stage["seconds"] for stage in reused), 1),
        reused=tuple(stage["name"] for stage in reused),
        before=tuple(row[2] for row in start),
        after=tuple(row[2] for row in end),
        explained=explained_by_critic(home, report, name),
    )


def explained_by_critic(home: Path, report: dict, name: str) -> tuple[float, ...]:
    """`critic/vf_explained_var` of every step behind the warm-up; none without a critic."""
    critic = load_recipe(name).rl.critic
    if critic is None:
        return ()
    by_step: dict[int, float] = {}
    for stage in report["stages"]:
        work = home / "store" / "work" / stage["fingerprint"]
        for journal in sorted(work.glob("attempt-*/journal.jsonl")):
            for record in map(json.loads, journal.read_text(encoding="utf-8").splitlines()):
                if (value := record.get("values", {}).get(EXPLAINED)) is not None:
                    by_step[record["step"]] = value
    return tuple(by_step[step] for step in sorted(by_step) if step > critic.num_warmup_steps)


def evaluation_rows(home: Path, digest: str) -> list[tuple[int, str, bool]]:
    """Number, prompt and greedy verdict of every problem of an evaluation.

    By the text alone, since a recipe may have its evaluations judged by the model that it trained.
    """
    path = home / "store" / "artifacts" / "evaluation" / digest / "rows.parquet"
    columns = ["index", "prompt", "ground_truth", "greedy"]
    return [
        (row["index"], row["prompt"], row["greedy"]["text"].strip() == row["ground_truth"])
        for row in pq.read_table(path, columns=columns).to_pylist()
    ]


def commit_now() -> str:
    """Short hash of the commit that is checked out, with `+` where tracked files have changed."""
    options = ("describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=7")
    found = subprocess.run(["git", *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return found.stdout.strip() or "unknown"


def line_of(result: Result) -> str:
    """One run in words."""
    verdicts = result.verdicts
    num_lost, _, num_won = verdicts.num_changes
    return (
        f"{result.recipe}, seed {result.seed}: {verdicts.accuracy_before:.1%} -> "
        f"{verdicts.accuracy_after:.1%} ({num_won} won, {num_lost} lost) in {result.wall_s:.0f} s"
        f"{', reused ' + ', '.join(result.reused) if result.reused else ''}"
    )


def row_of(results: Sequence[Result]) -> tuple[str, ...]:
    """The table's row of one recipe, over its seeds."""
    seeds = [result.verdicts for result in results]
    gain, longest_s = paired_gain(seeds), max(result.wall_s for result in results)
    explained = median_of([value for result in results for value in result.explained])
    share = [sum(values) / len(values) for values in zip(*map(accuracies, seeds), strict=True)]
    return (
        results[0].recipe,
        ", ".join(str(result.seed) for result in results),
        str(sum(len(each.before) for each in seeds)),
        f"{share[0]:.1%}",
        f"{share[1]:.1%}",
        f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})",
        str(gain.num_worse_seeds),
        "" if explained is None else f"{explained:.2f}",
        f"{longest_s:.0f}",
        ", ".join(sorted({result.commit for result in results})),
        verdict_of(gain.holds, longest_s, explained, MIN_EXPLAINED.get(results[0].recipe)),
    )


def median_of(values: Sequence[float]) -> float | None:
    """None of no values."""
    return statistics.median(values) if values else None


def accuracies(seed: PairedVerdicts) -> tuple[float, float]:
    """Of the start and of the end."""
    return seed.accuracy_before, seed.accuracy_after


def verdict_of(
    gains: bool, longest_s: float, explained: float | None, min_explained: float | None
) -> str:
    """Whether a recipe holds what it must, or what it lacks."""
    blind = min_explained is not None and (explained is None or explained <= min_explained)
    lacks = [
        *([] if gains else ["no gain"]),
        *(["blind critic"] if blind else []),
        *([] if longest_s <= MAX_WALL_S else [f"above {MAX_WALL_S:.0f} s"]),
    ]
    return ", ".join(lacks) or "yes"


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; shares in percent, gains in percentage points."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    note = f"Percentile bootstrap of paired verdicts, {NUM_DRAWS:,} draws."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note])


if __name__ == "__main__":
    sys.exit(main())
