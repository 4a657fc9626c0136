"""Do the trainers beside RL teach what they promise? `python tests/benchmarks/trainers.py [names]`.

Each run is `rlhf run <recipe> --seed <seed>`, and every seed has to hold:

* preferences (dpo, kto) and the reward model of rm_ppo: the share of held-out pairs whose chosen
  answer has the larger reward, before the first step and after the last. The 95 % Wilson interval
  of the end lies above the start.
* distillation: greedy accuracy of the student after SFT, of the student at the end and of its
  teacher, which `rlhf run quickstart` promotes first. At least half of the gap is closed.

What becomes of a policy by rejection sampling, self-play and PPO on a learned reward says
`recipes.py`. A finished run is kept as JSON below `<home>/results`: the next call goes on where
this one stopped.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import machine
from recipes import ROOT, commit_now, evaluation_rows, finished, result_path

from infra.store.storage import open_storage
from infra.tracking.journal import read_journal

HALF = 0.5
TEACHER = "quickstart"
HEADINGS = ("recipe", "seed", "what", "start", "end", "needs", "wall, s", "commit", "holds")


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        recipe: its name.
        seed: of the run.
        commit: of this project, with `+` where files had changed.
        wall_s: of the command.
        what: is measured, and of how many.
        start: before the first step.
        end: after the last.
        needs: what the end has to reach.
        reached: what is compared with that: the end, or the low end of its interval.
    """

    recipe: str
    seed: int
    commit: str
    wall_s: float
    what: str
    start: float
    end: float
    needs: float
    reached: float

    @property
    def holds(self) -> bool:
        """Whether the trainer did what it promises."""
        return self.reached > self.needs

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        shares = (f"{share:.1%}" for share in (self.start, self.end, self.needs))
        return (
            self.recipe, str(self.seed), self.what, *shares, f"{self.wall_s:.0f}", self.commit,
            "yes" if self.holds else "no",
        )  # fmt: skip


@dataclass(frozen=True)
class Numbers:
    """What one run says of one trainer; attributes as in `Outcome`."""

    what: str
    start: float
    end: float
    needs: float
    reached: float


def of_pairs(label: str, home: Path, report: dict[str, Any]) -> Numbers:
    """Held-out pairs of a stage, by its journal."""
    fingerprint = stage_of(report, label)["fingerprint"]
    records, _ = read_journal(open_storage(str(home / "store")), fingerprint)
    looks = {
        record.step: record.values
        for record in records
        if record.step is not None and "val-core/pair_accuracy" in record.values
    }
    first, last = looks[min(looks)]["val-core/pair_accuracy"], looks[max(looks)]
    end, low = last["val-core/pair_accuracy"], last["val-core/pair_accuracy_low"]
    return Numbers(f"{label}, {last['val-core/num_pairs']:.0f} pairs", first, end, first, low)


def of_student(home: Path, report: dict[str, Any]) -> Numbers:
    """Greedy accuracy; the teacher's is that of its own evaluation."""
    start, end = (accuracy(home, report, label) for label in ("evaluate_sft", "evaluate"))
    teacher = accuracy(home, taught_by(home), "evaluate")
    what = f"sums, teacher {teacher:.1%}"
    return Numbers(what, start, end, start + HALF * (teacher - start), end)


def accuracy(home: Path, report: dict[str, Any], label: str) -> float:
    """Share of the problems of an evaluation that are answered right."""
    rows = evaluation_rows(home, stage_of(report, label)["digest"])
    return sum(right for _, _, right in rows) / len(rows)


def taught_by(home: Path) -> dict[str, Any]:
    """The report of the teacher's run, which is kept."""
    kept = home / "results" / "teacher.json"
    if not kept.exists():
        report, _ = finished(home, TEACHER, 0)
        kept.write_text(json.dumps(report), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def stage_of(report: dict[str, Any], label: str) -> dict[str, Any]:
    """What the report has of a stage."""
    return next(stage for stage in report["stages"] if stage["name"] == label)


MEASURED: dict[str, Callable[[Path, dict[str, Any]], Numbers]] = {
    "dpo": partial(of_pairs, "preference"),
    "kto": partial(of_pairs, "preference"),
    "rm_ppo": partial(of_pairs, "reward_model"),
    "distill": of_student,
}


def outcome(home: Path, name: str, seed: int, changes: list[str]) -> Outcome:
    """Of a run that is kept, or made now."""
    path = result_path(home, name, seed, changes).with_suffix(".trainer.json")
    if not path.exists():
        if MEASURED[name] is of_student:
            taught_by(home)
        commit = commit_now()
        report, wall_s = finished(home, name, seed, changes)
        found = Outcome(name, seed, commit, wall_s, **asdict(MEASURED[name](home, report)))
        path.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
    return Outcome(**json.loads(path.read_text(encoding="utf-8")))


def main() -> int:
    """Run what is missing and print the table; 1 if a trainer does not hold what it must."""
    parser = argparse.ArgumentParser(description="Run the recipes of trainers beside RL.")
    parser.add_argument("names", nargs="*", metavar="recipe", help=", ".join(MEASURED))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--home", type=Path, default=ROOT / ".rlhf" / "trainers")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", dest="changes")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in MEASURED]
    if unknown:
        parser.error(f"got {unknown[0]!r}; need some of {', '.join(MEASURED)}")
    home = chosen.home.resolve()
    print(machine(), flush=True)
    found = []
    for name in chosen.names or MEASURED:
        for seed in chosen.seeds:
            found.append(outcome(home, name, seed, chosen.changes))
            print(" ".join(found[-1].row()), flush=True)
    print()
    for line in (HEADINGS, ("---",) * len(HEADINGS), *(each.row() for each in found)):
        print(f"| {' | '.join(line)} |")
    return int(not all(each.holds for each in found))


if __name__ == "__main__":
    sys.exit(main())
