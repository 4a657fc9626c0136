"""What each family of causal LMs does here: `python tests/zoo/model_zoo.py [families]`.

Each family has a process of its own, a fork of one that has loaded torch and transformers, with a
deadline and a limit of memory: one that crashes, hangs or eats memory is a row of the table and
ends nothing else. A result is kept as JSON below `<home>/results`: the next call goes on where this
one stopped, and what the engines changed since is tried again. Without names of families the page
docs/reference/models.md is written. Everything is seeded, and nothing is asked of a network.
"""

import argparse
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import family_checks
import torch
import transformers
from family_checks import Family
from rlhf.testing.forked import start_python
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo_table import (
    COLUMNS,
    ROOT,
    FamilyResult,
    keep_result,
    kept_result,
    page,
    reason_of,
    sources_digest,
)

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = ROOT / "docs" / "reference" / "models.md"
DEADLINE_S = 300.0
"""Of one family; on an idle core it takes 1 to 5 s."""
MEMORY_BYTES = 6 * 2**30
RESULT = "result.json"


def main() -> int:
    """Try what is missing; write the page where all families were asked for."""
    parser = argparse.ArgumentParser(description="Try every family of causal LMs.")
    parser.add_argument("names", nargs="*", metavar="family")
    parser.add_argument("--home", type=Path, default=ROOT / ".rlhf" / "zoo")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S)
    parser.add_argument("--be", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.be is not None:
        be_family(chosen.names[0], chosen.be)
        return 0
    unknown = [name for name in chosen.names if name not in FAMILIES]
    if unknown:
        parser.error(f"got {unknown[0]!r}; transformers has no causal LM of that type")
    home, sources, results = chosen.home.resolve(), sources_digest(), []
    for name in chosen.names or FAMILIES:
        path = home / "results" / f"{name}.json"
        result = kept_result(path, sources)
        if result is None:
            result = try_family(name, home / "work" / name, chosen.deadline_s, sources)
            keep_result(result, path)
        results.append(result)
        print(" ".join(result.row()), flush=True)
    if not chosen.names:
        PAGE.write_text(page(results, family_checks.GRADIENT, family_checks.LOGPROB), "utf-8")
    return 0


def try_family(name: str, root: Path, deadline_s: float, sources: str = "") -> FamilyResult:
    """Try one family in a process of its own.

    Args:
        name: its model type.
        root: directory of its own; removed in the end, whatever becomes of the process.
        deadline_s: for all columns together, in seconds.
        sources: of the result.

    Returns:
        The result; a process that does not end by itself counts against the column it was at.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    log = root / "log"
    process = start_python([str(Path(__file__)), name, "--be", str(root)], log)
    try:
        ending = ending_of(process.wait(deadline_s), log)
    except subprocess.TimeoutExpired:
        ending = f"it takes longer than {deadline_s:g} s"
    finally:
        process.kill()
    found = kept_result(root / RESULT, "") or FamilyResult(name)
    shutil.rmtree(root)
    if ending is not None:
        found = ended_early(found, ending)
    return FamilyResult(name, found.outcomes, found.why_not, sources)


def ending_of(code: int, log: Path) -> str | None:
    """How a process ended, in words; None for one that came to its end."""
    if code == 0:
        return None
    if code < 0:
        return f"its process is ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), f"exit code {code}")


def ended_early(result: FamilyResult, reason: str) -> FamilyResult:
    """The result of a process that ended by itself at the first column it could still try."""
    column = next((column for column in COLUMNS if result.can_try(column)), None)
    return result if column is None else result.with_outcome(column, reason)


def be_family(name: str, root: Path) -> None:
    """In its process: try the columns in order, and write after each what is known."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    family, result = Family(name, root), FamilyResult(name)
    for column in COLUMNS:
        if not result.can_try(column):
            continue
        try:
            getattr(family_checks, column)(family)
            reason = None
        except Exception as error:  # noqa: BLE001 (whatever a family does is its row)
            reason = reason_of(error, root)
        result = result.with_outcome(column, reason)
        keep_result(result, root / RESULT)


if __name__ == "__main__":
    sys.exit(main())
