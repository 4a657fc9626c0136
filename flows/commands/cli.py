"""The command `rlhf`: its parser, and how errors are reported.

Promises: `--help` and the errors of `load_recipe` appear within two seconds, as heavy libraries are
imported when needed. A `ConfigError` is one line on stderr and exit code 2; other expected
errors print their text and exit with code 1. `--debug` adds the traceback.
"""

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flows.recipe.source import SUITES_DIR, shipped_names
from infra import env
from infra.errors import EXIT_USER_ERROR, ConfigError, PipelineError
from infra.host.signals import OrderlyEnd
from infra.redact import redact
from infra.waiting import FULL_DISK

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
FUNCTIONS = {
    "plan": "run:plan",
    "evaluate": "run:evaluate",
    "flow": "run:flow",
    "nightly": "run:nightly",
    "diagnose": "show:diagnose",
    "up": "services:up",
    "down": "services:down",
    "status": "services:status",
    "automations": "services:automations",
}
"""Functions of the commands that are not `main` of a module with the command's name."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2; the line refers to `--help` for the usage."""
        message = redact(message.removeprefix("argument "))
        self.exit(EXIT_USER_ERROR, f"{message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; `argv` excludes the program name, and None means `sys.argv`."""
    debug = False
    try:
        with OrderlyEnd() if argv is None else contextlib.nullcontext():
            arguments = build_parser().parse_args(argv)
            debug = arguments.debug
            if debug:
                env.set_for_process(env.RLHF_DEBUG.name, "1")
            # Imported by name, so that `rlhf recipes` skips the heavy imports of `rlhf run`.
            target = FUNCTIONS.get(arguments.command, f"{arguments.command}:main")
            module, _, function = target.partition(":")
            return getattr(importlib.import_module(f"flows.commands.{module}"), function)(arguments)
    except ConfigError as error:
        return _fail(error, EXIT_USER_ERROR, debug)
    except PipelineError as error:
        return _fail(error, EXIT_FAILURE, debug)
    except BrokenPipeError:
        # `rlhf doctor | head` closes the pipe. Without this, Python reports it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except OSError as error:
        return _fail(error, EXIT_FAILURE, debug)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command resumes\n")
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="rlhf", description="RL post-training as one resumable, reproducible pipeline"
    )
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (does, *arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=does, description=does)
        for flag, settings in (DEBUG, *arguments):
            command.add_argument(flag, **settings)
    return parser


Argument = tuple[str, dict[str, Any]]


def _argument(flag: str, metavar: str, does: str, **settings: Any) -> Argument:
    """Return an argument with a value; one without dashes is positional."""
    return flag, {"metavar": metavar, "help": does, **settings}


def _several(flag: str, metavar: str, does: str, **settings: Any) -> Argument:
    """Return an option that may be repeated; its value is a list, empty without it."""
    settings = {"action": "append", "default": [], **settings}
    return _argument(flag, metavar, does, **settings)


def _switch(flag: str, does: str) -> Argument:
    return flag, {"action": "store_true", "help": does}


def _overrides(example: str) -> Argument:
    does = f"replace one value, e.g. {example}; may be repeated"
    return _several("--set", "PATH=VALUE", does, dest="overrides")


DEBUG = _switch("--debug", "show tracebacks")
JSON = _switch("--json", "print JSON, for programs")
STORE = _argument("--store", "URI", "use this store instead of the home's")
RECIPE = (
    _argument("recipe", "RECIPE", "a recipe's name or a YAML file"),
    _overrides("rl.num_rounds=3"),
    ("--seed", {"type": int, "help": "replace the recipe's seed"}),
    _several(
        "--force",
        "STAGE",
        "run a finished stage again, e.g. sft or rl_round_2; may be repeated",
    ),
    _argument(
        "--from",
        "STAGE",
        "run a stage again and reuse all before it; refused if an earlier stage is not done",
        dest="start_from",
    ),
)
COMMANDS: Mapping[str, tuple[str, *tuple[Argument, ...]]] = {
    "run": (
        "run a recipe; finished stages are reused",
        *RECIPE,
        _several(
            "--adopt",
            "STAGE",
            "continue a stage half-trained before an edit or in another layout; may be repeated",
        ),
        _switch("--local", "run in this process, even if a worker of `rlhf up` could run it"),
    ),
    "flow": (
        "run a flow of your own over the same stages",
        _argument("flow", "FLOW", "a Python file with a flow, or FILE:FLOW"),
        _overrides("data.arithmetic.num_sft=512"),
    ),
    "plan": (
        "show each stage, its fingerprint and whether it is done; run nothing",
        *RECIPE,
        JSON,
        _argument(
            "--on",
            "MACHINE",
            "show instead what each stage needs on a machine, which need not be this one: h100x8, "
            "a100x8, h200x1, b200x8, mi300x8 or a .json file",
        ),
    ),
    "recipes": ("list the recipes that ship with this project",),
    "engines": ("show the training engines, where they run and how they are tested", JSON),
    "doctor": (
        "check this machine from end to end",
        JSON,
        _argument("--store", "URI", "also check this store, which a recipe names"),
        _argument(
            "--survey",
            "FILE.json",
            "also describe this machine in a file, for `rlhf plan --on` on any machine",
            type=Path,
        ),
    ),
    "up": ("start Prefect server, worker, Ray and MLflow on this machine",),
    "down": ("stop every server of this home that no living run uses",),
    "status": ("show the servers of this home, and the stages that jobs hold", STORE),
    "show": (
        "write a page of the samples of a run's policy, step by step",
        _argument(
            "run",
            "RUN",
            "a run's name, its Prefect or MLflow id, or the beginning of a stage's fingerprint; "
            "by default the latest",
            nargs="?",
        ),
        _argument("--against", "RUN", "another run to show beside it"),
        _argument("--out", "FILE", "file of the page; by default in the run's directory"),
        STORE,
    ),
    "diagnose": (
        "diagnose a run: findings, and what to try next",
        _argument("run", "RUN", "as for `show`; by default the latest", nargs="?"),
        JSON,
        STORE,
    ),
    "automations": ("have a Prefect server pick up runs whose process was killed",),
    "gc": (
        "show what a store holds that nothing needs; --delete removes it",
        STORE,
        _argument(
            "--unused",
            "AGE",
            "remove what nothing needs after this time, e.g. 36h or 30d; at least a day",
            default="30d",
        ),
        _argument("--max-size", "SIZE", "remove the least recently used above this, e.g. 500GB"),
        _several("--keep", "RUN", "keep what a run used"),
        _several("--release", "RUN", "stop keeping what a run used"),
        _switch("--delete", "remove what is shown"),
        JSON,
    ),
    "nightly": (
        "compute recipes anew and report whether each was reproduced",
        _argument("recipes", "RECIPE", "names or YAML files; default: a small set", nargs="*"),
        _argument("--baselines", "DIR", "stored measurements; default: flows/baselines"),
        _switch("--accept", "run nothing; store the last night's results as baselines"),
    ),
    "evaluate": (
        "measure a model on suites, alone or compared with another",
        _argument("model", "MODEL", "a model directory, a hub id or models:/NAME@ALIAS"),
        _several(
            "--suite",
            "SUITE",
            f"{', '.join(shipped_names(SUITES_DIR))}, or a YAML file; may be repeated",
            dest="suites",
            required=True,
        ),
        _argument("--against", "MODEL", "compare with it, problem by problem"),
        _overrides("rollout.engine=vllm or suites.gsm8k.evaluation.num_samples=8"),
        ("--seed", {"type": int, "help": "seed of sampled answers and generated problems"}),
        JSON,
        _switch("--local", "as for `run`"),
    ),
    "merge": (
        "write a policy checkpoint as a Hugging Face directory",
        _argument("checkpoint", "CHECKPOINT", "a published policy artifact"),
        _argument("out", "OUT", "a directory that does not exist yet"),
        ("--dtype", {"choices": ("float32", "bfloat16"), "default": "float32"}),
        _switch("--adapter-only", "write only the low-rank adapter, in PEFT's format"),
    ),
}
"""What each command does, and its arguments; all of them have `--debug`."""


def _fail(error: PipelineError | OSError, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    text = str(error)
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        place = error.filename or "a disk of this run (home, store or temporary directory)"
        stage = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        text = f"{stage}{place} is full; free space there, then the same command resumes"
    sys.stderr.write(f"{redact(text)}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
