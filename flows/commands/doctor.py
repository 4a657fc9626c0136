"""`rlhf doctor`: one line per check of this machine, and a verdict."""

import argparse
import dataclasses
import json
import sys

from flows.checks import Check, all_checks

MARKS = {"ok": "ok  ", "warning": "warn", "error": "FAIL"}


def main(arguments: argparse.Namespace) -> int:
    """Run all checks; the exit code is 1 if a required part is broken."""
    checks: list[Check] = []
    for check in all_checks(arguments.store):
        checks.append(check)
        if not arguments.json:
            sys.stdout.write(f"{MARKS[check.status]}  {check.name:<22} {check.detail}\n")
            sys.stdout.flush()
    broken = [check.name for check in checks if check.status == "error"]
    verdict = f"broken: {', '.join(broken)}" if broken else "this machine can run the pipeline"
    if arguments.json:
        rows = [dataclasses.asdict(check) for check in checks]
        sys.stdout.write(json.dumps({"checks": rows, "verdict": verdict}, indent=2) + "\n")
    else:
        sys.stdout.write(f"{verdict}\n")
    return 1 if broken else 0
