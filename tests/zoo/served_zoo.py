"""What vLLM and SGLang do with families: `python tests/zoo/served_zoo.py [families]`.

A family is trained here, in the project's own environment, and each engine is asked in a process of
its environment `.envs/NAME`, with a deadline: one that crashes or hangs is a row of the table and
ends nothing else. A result is kept as JSON below `<home>/served`: the next call goes on where this
one stopped, and what the engines changed since is tried again. With all families of all engines the
page docs/reference/served_models.md is written. Everything is seeded, and nothing is asked of a
network.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import served_checks
import torch
import transformers
from family_checks import LOGPROB
from model_zoo import ending_of
from plain_reference import Lacking
from served_checks import TrainedFamily, train_family
from served_probe import NUM_TOP, Answers, kept_answers
from served_table import COLUMNS, ENGINES, FAMILIES, PAGE, served_digest, served_page
from zoo_table import ROOT, FamilyResult, keep_result, kept_result

from infra import env

PROBE = Path(__file__).with_name("served_probe.py")
DEADLINE_S = 600.0
"""Of one engine with one family; on an idle core it takes 30 to 60 s."""
CHECKED = ("samples", "agrees", "prompts")
"""Columns that are held against a reference; of the others the engine's own word counts."""


def main() -> int:
    """Try what is missing; write the page where everything was asked for."""
    parser = argparse.ArgumentParser(description="Try families on vLLM and SGLang.")
    parser.add_argument("names", nargs="*", metavar="family", help="default: those of the page")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="default: all")
    parser.add_argument("--home", type=Path, default=ROOT / ".rlhf" / "zoo")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    engines = (chosen.engine,) if chosen.engine else tuple(ENGINES)
    results: dict[str, list[FamilyResult]] = {engine: [] for engine in engines}
    for name in chosen.names or FAMILIES:
        found = try_family(name, engines, chosen.home.resolve(), chosen.deadline_s)
        for engine, result in found.items():
            results[engine].append(result)
            print(engine, *result.row(COLUMNS), flush=True)
    if not chosen.names and chosen.engine is None:
        PAGE.write_text(served_page(results, LOGPROB, NUM_TOP), encoding="utf-8")
    return 0


def try_family(
    name: str, engines: tuple[str, ...], home: Path, deadline_s: float
) -> dict[str, FamilyResult]:
    """Train a family once and ask each engine, as far as no result is kept.

    Args:
        name: its model type.
        engines: by name.
        home: of results and of work, which is removed in the end.
        deadline_s: of one engine, in seconds.

    Returns:
        By engine.
    """
    paths = {engine: home / "served" / engine / f"{name}.json" for engine in engines}
    digests = {engine: served_digest(engine) for engine in engines}
    kept = {engine: kept_result(paths[engine], digests[engine]) for engine in engines}
    found = {engine: result for engine, result in kept.items() if result is not None}
    if len(found) < len(engines):
        work = home / "work" / f"served-{name}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        model = train_family(name, work)
        for engine in engines:
            if engine not in found:
                outcome = judged(model, name, asked(engine, work, deadline_s))
                found[engine] = FamilyResult(
                    name, outcome.outcomes, outcome.why_not, digests[engine]
                )
                keep_result(found[engine], paths[engine])
        shutil.rmtree(work)
    return {engine: found[engine] for engine in engines}


def asked(engine: str, root: Path, deadline_s: float) -> Answers:
    """What an engine says of the model in a directory, in a process of its environment.

    Args:
        engine: its name.
        root: see `served_probe`.
        deadline_s: of the process, in seconds.

    Returns:
        Its answers; how it ended where it did so before their end.
    """
    python, log = ROOT / ".envs" / engine / "bin" / "python", root / f"{engine}.log"
    (root / "answers.json").unlink(missing_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, PROBE, engine, root], stdout=file, stderr=subprocess.STDOUT,
            env=env.child_environment(OMP_NUM_THREADS="1"), start_new_session=True,
        )  # fmt: skip
    try:
        ending = ending_of(process.wait(deadline_s), log)
    except subprocess.TimeoutExpired:
        ending = f"it takes longer than {deadline_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    answers = kept_answers(root)
    problem = answers.problem if ending is None else ending
    return answers.model_copy(update={"problem": cause_of(problem, log)})


def cause_of(problem: str, log: Path) -> str:
    """The error behind one that says that a process of the engine ended.

    Args:
        problem: vLLM refers to its log, SGLang's server is told of with the end of its own.
        log: of the process that was asked.

    Returns:
        The first error of the one, the last of the other; else the problem as it is.
    """
    if "See root cause above" in problem:
        text = log.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r" ERROR .*?(\w*Error: .+)", text)[:1]
    else:
        found = re.findall(r"^(\w*Error: .+)", problem.partition("\n")[2], re.MULTILINE)[-1:]
    return found[0] if found else problem


def judged(model: TrainedFamily, name: str, answers: Answers) -> FamilyResult:
    """The row of an engine: its own words up to where it came, held against the references."""
    result = FamilyResult(name)
    for column in COLUMNS:
        if column in answers.reached or (column == "agrees" and "samples" in answers.reached):
            result = result.with_outcome(column, reason(model, column, answers))
        elif answers.problem:
            return result.with_outcome(column, answers.problem)
    return result


def reason(model: TrainedFamily, column: str, answers: Answers) -> str | None:
    """Why a column that was reached does not hold; None where it does."""
    if column not in CHECKED:
        return None
    try:
        getattr(served_checks, column)(model, answers)
    except Lacking as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
