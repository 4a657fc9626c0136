"""The command `rlhf`: its parser, and how errors are reported.

Promises: `--help` and every error in a recipe appear within two seconds, because nothing heavy is
imported before it is needed. A `ConfigError` is one line on stderr and exit code 2; other expected
errors print their text and exit with code 1. `--debug` adds the traceback.
"""

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from flows.recipe.source import SUITES_DIR, shipped_names
from infra import env
from infra.errors import EXIT_USER_ERROR, ConfigError, PipelineError
from infra.host.signals import OrderlyEnd
from infra.redact import redact
from infra.waiting import FULL_DISK

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
MODULES = dict.fromkeys(("up", "down", "status", "automations"), "services")
"""Modules of the commands that have a name other than their module's."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2; the line refers to `--help` for the usage."""
        problem = message.removeprefix("argument ")
        self.exit(EXIT_USER_ERROR, f"{redact(problem)}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command; `argv` excludes the program name, and None means `sys.argv`."""
    in_own_process = argv is None
    debug = False
    try:
        with OrderlyEnd() if in_own_process else contextlib.nullcontext():
            arguments = build_parser().parse_args(argv)
            debug = arguments.debug
            if debug:
                env.set_for_process(env.RLHF_DEBUG.name, "1")
            # Imported by name, so that `rlhf recipes` skips the heavy imports of `rlhf run`.
            name = MODULES.get(arguments.command, arguments.command)
            command = importlib.import_module(f"flows.commands.{name}")
            return command.main(arguments)
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

    def add(name: str, does: str, *fills: Callable[[argparse.ArgumentParser], None]) -> None:
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument("--debug", action="store_true", help="show tracebacks")
        for fill in fills:
            fill(command)

    add("run", "run a recipe; finished stages are reused", _add_recipe, _add_run)
    add("flow", "run a flow of your own over the same stages", _add_flow)
    does = "show each stage, its fingerprint and whether it is done; run nothing"
    add("plan", does, _add_recipe, _add_json)
    add("recipes", "list the recipes that ship with this project")
    does = "show the training engines, where they run and how they are tested"
    add("engines", does, _add_json)
    add("doctor", "check this machine from end to end", _add_json, _add_doctor)
    add("up", "start Prefect server, worker, Ray and MLflow on this machine")
    add("down", "stop every server of this home that no living run uses")
    add("status", "show the servers of this home, and who works on which stage", _add_store)
    add("show", "write a page of what a run's policy wrote, step by step", _add_show, _add_store)
    does = "diagnose a run: findings, and what to try next"
    add("diagnose", does, _add_diagnose, _add_json, _add_store)
    add("automations", "have a Prefect server pick up runs whose process was killed")
    add("gc", "show what a store holds without need; --delete removes it", _add_gc)
    does = "compute recipes afresh and say of each whether it was reproduced"
    add("nightly", does, _add_nightly)
    add("evaluate", "measure a model on suites, by itself or with another", _add_evaluate)
    add("merge", "write a policy checkpoint as a Hugging Face directory", _add_merge)
    return parser


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for machines")


def _add_store(command: argparse.ArgumentParser) -> None:
    command.add_argument("--store", metavar="URI", help="another store than that of this home")


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a recipe's name or a YAML file")
    _add_overrides(command, "rl.num_rounds=3")
    command.add_argument("--seed", type=int, help="replace the recipe's seed")
    command.add_argument(
        "--force",
        metavar="STAGE",
        action="append",
        default=[],
        help="run a finished stage again, e.g. sft or rl_round_2; may be repeated",
    )
    command.add_argument(
        "--from",
        dest="start_from",
        metavar="STAGE",
        help="reuse everything before a stage, which runs again; refused if some of it is not done",
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--adopt",
        metavar="STAGE",
        action="append",
        default=[],
        help="continue what was half-trained before an edit or in another layout; may be repeated",
    )
    command.add_argument(
        "--local",
        action="store_true",
        help="run in this process, also where a worker of `rlhf up` would do it",
    )


def _add_flow(command: argparse.ArgumentParser) -> None:
    command.add_argument("flow", metavar="FLOW", help="a Python file with a flow, or FILE:FLOW")
    _add_overrides(command, "data.arithmetic.num_sft=512")


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--store", metavar="URI", help="a store that a recipe names, to look at too"
    )


def _add_show(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's name, its Prefect or MLflow id, or the beginning of a stage's fingerprint; "
        "by default the latest",
    )
    command.add_argument("--against", metavar="RUN", help="another run, to put beside it")
    command.add_argument(
        "--out", metavar="FILE", help="the page; by default in the run's directory"
    )


def _add_diagnose(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run", metavar="RUN", nargs="?", help="as of `show`; by default the latest"
    )


def _add_merge(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a published policy artifact")
    command.add_argument("out", metavar="OUT", help="a directory that does not exist yet")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    command.add_argument(
        "--adapter-only", action="store_true", help="the low-rank adapter alone, as PEFT loads it"
    )


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", metavar="MODEL", help="a model directory, a hub id or models:/NAME@ALIAS"
    )
    command.add_argument(
        "--suite",
        dest="suites",
        metavar="SUITE",
        action="append",
        required=True,
        help=f"{', '.join(shipped_names(SUITES_DIR))}, or a YAML file; may be repeated",
    )
    command.add_argument("--against", metavar="MODEL", help="compare with it, problem by problem")
    _add_overrides(command, "rollout.engine=vllm or suites.gsm8k.evaluation.num_samples=8")
    command.add_argument("--seed", type=int, help="of sampled answers and generated problems")
    _add_json(command)
    command.add_argument("--local", action="store_true", help="as of `run`")


def _add_overrides(command: argparse.ArgumentParser, example: str) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help=f"replace one value, e.g. {example}; may be repeated",
    )


def _add_nightly(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "recipes", metavar="RECIPE", nargs="*", help="names or YAML files; default: all that ship"
    )
    command.add_argument(
        "--baselines", metavar="DIR", help="what is stored of them; default: flows/baselines"
    )
    command.add_argument(
        "--accept", action="store_true", help="run nothing; take the last night's results for right"
    )


def _add_gc(command: argparse.ArgumentParser) -> None:
    _add_store(command)
    command.add_argument(
        "--unused",
        metavar="AGE",
        default="30d",
        help="what nothing needs goes after so long, e.g. 12h or 30d; a day at least",
    )
    command.add_argument(
        "--max-size", metavar="SIZE", help="beyond it the least recently used goes, e.g. 500GB"
    )
    command.add_argument(
        "--keep", metavar="RUN", action="append", default=[], help="keep what a run used"
    )
    command.add_argument(
        "--release", metavar="RUN", action="append", default=[], help="keep it no longer"
    )
    command.add_argument("--delete", action="store_true", help="remove what is shown")
    _add_json(command)


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
