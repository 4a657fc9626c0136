"""Whole pipelines on one device, through Prefect, Ray and MLflow: `make gpu-pipeline`.

On a GPU: the quickstart with the embedded engine, then a short one whose answers come from a
colocated vLLM, if its job environment is there. Without a GPU, or with `--device cpu`, the tiny
pipeline of the tests. Of each: the seconds of its stages, the share of the command's time that is
no engine's work, and whether the promoted model can be loaded.

Engines work while a job preprocesses, trains, generates, scores, evaluates or saves a merged model;
the rest is the start of processes and servers, imports, loading, checkpoints and waiting.

Run: python tests/gpu/gpu_pipeline.py [--device auto] [--limit-s 480] [--set PATH=VALUE]
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e"))
from tiny_pipeline import Home, settings

from hardware.detection import detect
from infra.job_environments import interpreter_of

ENGINE_PHASES = ("preprocess", "train", "gen", "reward", "evaluate")
"""Of `job_seconds` in a run's report."""
GOAL = 0.25
CLEAN_UP_S = 30.0
SHORT_WITH_VLLM = (
    "rollout.engine=vllm", "model.architecture.head_dim=64", "training.dtype=bfloat16",
    "sft.num_steps=60", "rl.num_rounds=1", "rl.num_steps_per_round=6",
    "rl.optimizer.num_warmup_steps=1", "promote.min_value=0", "promote.model_name=quickstart-vllm",
)  # fmt: skip
"""vLLM has no kernels for heads of 32 on a GPU; so short a run need not learn to be promoted."""


@dataclass(frozen=True)
class Pipeline:
    """A recipe with some of its values, and what it needs.

    Attributes:
        recipe: None is that of the tests.
        environment: job environment, by name.
    """

    name: str
    recipe: str | None
    values: tuple[str, ...] = ()
    environment: str | None = None


PIPELINES = {
    "cpu": (Pipeline("tiny", None),),
    "gpu": (
        Pipeline("quickstart, embedded", "quickstart"),
        Pipeline("short, vLLM colocated", "quickstart", SHORT_WITH_VLLM, "vllm"),
    ),
}


@dataclass(frozen=True)
class Ended:
    """How a pipeline ended.

    Attributes:
        stages: wall seconds by stage.
        overhead: share of the command's seconds that is no engine's work; None if it failed.
    """

    name: str
    seconds: float
    problem: str
    stages: Mapping[str, float]
    accuracy: Mapping[str, float]
    overhead: float | None


def overhead_of(stages: Sequence[Mapping], seconds: float) -> float:
    """Share of the seconds outside the engines' phases of the stages that this run computed.

    Stages with one fingerprint are one job.
    """
    jobs = {stage["fingerprint"]: stage for stage in stages if not stage["reused"]}
    work_s = sum(
        stage["job_seconds"].get(phase, 0.0) for stage in jobs.values() for phase in ENGINE_PHASES
    )
    return 1.0 - work_s / seconds


def run(pipeline: Pipeline, home: Home, values: Sequence[str], limit_s: float) -> Ended:
    """Run `rlhf run` to its end, or to the limit, and look at what it left."""
    if pipeline.environment and interpreter_of(pipeline.environment) is None:
        return unfinished(pipeline, 0.0, f"needs make env-{pipeline.environment}")
    start = time.monotonic()
    code, printed = followed(home, [*pipeline.values, *values], limit_s)
    seconds = time.monotonic() - start
    if code != 0:
        why = "the time limit" if code is None else f"exit code {code}"
        return unfinished(pipeline, seconds, f"{why}: {last_line(printed)}")
    report = home.report(printed)
    return Ended(
        pipeline.name,
        seconds,
        problem_of_promotion(home, report),
        {stage["name"]: stage["seconds"] for stage in report["stages"]},
        report["accuracy"],
        overhead_of(report["stages"], seconds),
    )


def unfinished(pipeline: Pipeline, seconds: float, problem: str) -> Ended:
    """Without figures."""
    return Ended(pipeline.name, seconds, problem, {}, {}, None)


def followed(home: Home, values: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code and all output; None: interrupted at the limit."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            home.command("run", *settings(*values)), stdout=output, stderr=subprocess.STDOUT,
            env=home.environment, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # ends its job and its servers
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(CLEAN_UP_S)
        output.seek(0)
        return code, output.read()


def last_line(printed: str) -> str:
    """What was printed last, short."""
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""


def problem_of_promotion(home: Home, report: Mapping) -> str:
    """Why the run's model is not the registry's champion; empty if it is, and loads.

    Asked in a process of its own: MLflow stays in the process that it is imported in.
    """
    if not report["promoted"]:
        return f"nothing was promoted; accuracy {report['accuracy'].get('final')}"
    recipe = json.loads((home.path / "runs" / report["run"] / "recipe.json").read_text())
    merged = next(s["digest"] for s in report["stages"] if s["name"] == "merge")
    asked = subprocess.run(
        [sys.executable, "-c", ASK_REGISTRY, f"sqlite:///{home.path / 'mlflow.db'}",
         recipe["promote"]["model_name"], merged],
        capture_output=True, text=True, env=home.environment, timeout=300,
    )  # fmt: skip
    return "" if asked.returncode == 0 else f"the promoted model: {last_line(asked.stderr)}"


ASK_REGISTRY = """
import sys
from mlflow import set_tracking_uri
from mlflow.tracking import MlflowClient
from mlflow.transformers import load_model
uri, name, digest = sys.argv[1:]
set_tracking_uri(uri)
version = MlflowClient(uri).get_model_version_by_alias(name, "champion")
assert version.tags["rlhf.digest"] == digest, f"{version.tags} has not digest {digest}"
model = load_model(f"models:/{name}@champion", return_type="components")["model"]
assert sum(weight.numel() for weight in model.parameters()) > 0
"""


def text_of(ended: Ended) -> str:
    """A table of the stages, the share and the verdict."""
    lines = [f"{ended.name}: {ended.problem or 'promoted, and the model loads'}"]
    if ended.overhead is None:
        return lines[0]
    lines += ["", "| stage | seconds | accuracy |", "| --- | ---: | ---: |"]
    for name, seconds in ended.stages.items():
        of = re.sub(r"^evaluate_?", "", name) or "final"
        accuracy = ended.accuracy.get(of) if name.startswith("evaluate") else None
        shown = "" if accuracy is None else f"{accuracy:.1%}"
        lines.append(f"| {name} | {seconds:.1f} | {shown} |")
    verdict = "reached" if ended.overhead <= GOAL else "missed"
    lines += [
        "",
        f"command {ended.seconds:.0f} s, outside engine work {ended.overhead:.0%} "
        f"(goal on a GPU: at most {GOAL:.0%}, {verdict})",
    ]
    return "\n".join(lines)


def main() -> int:
    """Print a table per pipeline; 1 if one that could run did not promote its model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="platform: auto, nvidia, cpu, ...")
    parser.add_argument("--limit-s", type=float, default=480.0, help="of all pipelines")
    parser.add_argument("--set", action="append", default=[], dest="values", metavar="PATH=VALUE")
    chosen = parser.parse_args()
    deadline = time.monotonic() + chosen.limit_s
    platform, reason = detect(chosen.device)
    print(reason, flush=True)
    kind = "cpu" if platform.device_name == "cpu" else "gpu"
    failed = False
    with tempfile.TemporaryDirectory(prefix="gpu-pipeline-", ignore_cleanup_errors=True) as name:
        for number, pipeline in enumerate(PIPELINES[kind]):
            left_s = deadline - time.monotonic() - CLEAN_UP_S
            home = Home(Path(name) / str(number), pipeline.recipe)
            values = [f"hardware.platform={platform.name}", *chosen.values]
            ended = run(pipeline, home, values, left_s)
            print(f"\n{text_of(ended)}", flush=True)
            failed |= bool(ended.problem) and not ended.problem.startswith("needs ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
