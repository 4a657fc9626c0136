"""Run benchmarks and print their ratios: `python tests/benchmarks/run.py [names] [--repeats N]`.

Each benchmark is a program of its own and says at its top what it compares and how. Ours and the
peer take turns inside one run, so that a busy machine slows both; the spread is printed beside
each median. Without names, all of them.
"""

import argparse
import subprocess
import sys

from measure import HERE, machine

BENCHMARKS = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}


def main() -> int:
    """Run the chosen benchmarks one after the other; 1 if one of them failed to run."""
    parser = argparse.ArgumentParser(description="Run benchmarks and print ratios.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--peer-python", default=None, help="interpreter of the peer's environment")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"got {unknown[0]!r}; need one of {', '.join(BENCHMARKS)}")
    options = ["--repeats", str(chosen.repeats)]
    if chosen.threads:
        options += ["--threads", str(chosen.threads)]
    if chosen.peer_python:
        options += ["--peer-python", chosen.peer_python]
    print(machine(), flush=True)
    failed = False
    for name in chosen.names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        done = subprocess.run([sys.executable, str(BENCHMARKS[name]), *options], check=False)
        if done.returncode:
            print(f"  {name} did not run to its end: exit code {done.returncode}", flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
