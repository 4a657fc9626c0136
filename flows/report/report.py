"""The report of a pipeline run: what ran, what came out, where the time went.

`<home>/runs/<run name>/` holds `report.json` (for machines), `report.md` (for people), the plots
as SVG and PNG, `samples.html`, `diagnosis.html`, and `recipe.json`, the resolved recipe, which is
there from the beginning of the run.
Promises: times are those of the work itself, whichever run did it; a run that reuses every stage
leaves the report of the run that did the work as it is.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from flows.diagnosis.diagnosis import diagnose
from flows.diagnosis.evidence import stage_views
from flows.diagnosis.page import DIAGNOSIS_PAGE, told_verdict, write_diagnosis
from flows.recipe.recipe import Recipe
from flows.report.curves import median_step, pair_curves, run_on
from flows.report.measured import measured_tables
from flows.report.plot_data import Bar, PlotData
from flows.report.plots import draw_plots
from flows.report.samples import PAGE_NAME, samples_page, shown_run
from flows.report.sources import source_table
from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.canonical import canonical_json
from infra.store.stage_spec import Adoption
from infra.tracking.history import StageHistory
from infra.tracking.journal import JournalRecord
from tasks.runner.run import StageResult, headline_metric

REPORT_JSON = "report.json"
REPORT_MD = "report.md"
RECIPE_JSON = "recipe.json"
NOTHING_REJECTED: Mapping[str, str] = {}
PLOT_TITLES = {
    "accuracy": "Held-out accuracy",
    "reward": "Reward",
    "loss": "Supervised loss",
    "reward_model_accuracy": "Reward model: pairs told apart",
    "reward_model_loss": "Reward model: loss",
    "reward_model_margin": "Reward model: margin",
    "preference_accuracy": "Preferences: pairs told apart",
    "preference_loss": "Preferences: loss",
    "preference_margin": "Preferences: margin",
    "distillation": "Distillation",
    "lengths": "Response length",
    "step": "The median RL step",
    "time": "Time",
}


class StageReport(BaseModel, frozen=True):
    """One stage in `report.json`."""

    name: str
    reused: bool
    seconds: float
    """Wall seconds of the work: as this run waited for it, or of the job that is reused."""
    digest: str
    fingerprint: str
    metrics: dict[str, float]
    job_seconds: dict[str, float]
    """Seconds of the job's phases when it was computed."""
    adopted: Adoption | None = None
    """Half-trained work that the stage continued; None: it began by itself."""
    rejected: str = ""
    """The symptom for which what follows took the policy before it; empty: it counts."""

    @property
    def state(self) -> str:
        """Outcome, one word for tables."""
        return "rejected" if self.rejected else "reused" if self.reused else "ran"


class Report(BaseModel, frozen=True):
    """`report.json`."""

    run: str
    recipe: str
    seed: int
    finished_at: str
    """UTC, ISO 8601."""
    seconds: float
    """Wall seconds of this run, from its first stage to the end of its last."""
    stages: list[StageReport]
    accuracy: dict[str, float]
    """Held-out accuracy by training stage, in order; then `final`, of the final model, `against`
    and `incumbent`, of those that it was compared with, and by suite, `<suite>_against` too."""
    promoted: bool

    @property
    def outputs(self) -> list[tuple[str, str, str]]:
        """Fingerprint, digest and rejection of each stage, which the plots depend on."""
        return [(stage.fingerprint, stage.digest, stage.rejected) for stage in self.stages]


def run_directory(recipe: Recipe) -> Path:
    """The directory of a run's report, with its recipe in it.

    Args:
        recipe: of the run; its home holds the directory.
    """
    directory = recipe.home / "runs" / recipe.run_name
    make_directories(directory)
    atomic_write_bytes(directory / RECIPE_JSON, canonical_json(recipe))
    return directory


def build_report(
    recipe: Recipe,
    results: Sequence[StageResult],
    seconds: float,
    rejected: Mapping[str, str] = NOTHING_REJECTED,
) -> Report:
    """Sum up a finished run.

    Args:
        results: its stages, in order.
        seconds: wall seconds of the run.
        rejected: symptom by label of a round from which nothing followed.
    """
    names = distinct_names([result.label for result in results])
    return Report(
        run=recipe.run_name,
        recipe=recipe.name,
        seed=recipe.seed,
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=seconds,
        stages=[
            StageReport(
                name=name,
                reused=result.reused,
                seconds=_work_seconds(result),
                digest=result.digest,
                fingerprint=result.fingerprint,
                metrics=result.metrics,
                job_seconds=result.job_seconds,
                adopted=result.adopted,
                rejected=rejected.get(result.label, ""),
            )
            for name, result in zip(names, results, strict=True)
        ],
        accuracy={
            evaluated_name(name): result.metrics["accuracy"]
            for name, result in zip(names, results, strict=True)
            if result.label.startswith("evaluate") and "accuracy" in result.metrics
        },
        promoted=any(result.metrics.get("promoted", 0.0) > 0 for result in results),
    )


def distinct_names(labels: Sequence[str]) -> list[str]:
    """Number equal labels, which a flow of the user's may have: `sft`, `sft_2`, `sft_3`.

    Args:
        labels: of stages, in order.
    """
    names: list[str] = []
    for label in labels:
        numbered = (label, *(f"{label}_{number}" for number in range(2, len(labels) + 2)))
        names.append(next(name for name in numbered if name not in names))
    return names


def _work_seconds(result: StageResult) -> float:
    return result.job_seconds.get("total", result.wall_s) if result.reused else result.wall_s


def evaluated_name(label: str) -> str:
    """Name of what an evaluation measured: `sft` for `evaluate_sft`, `final` for `evaluate`."""
    return label.removeprefix("evaluate").removeprefix("_") or "final"


def write_report(report: Report, recipe: Recipe, history: StageHistory) -> Path:
    """Write the report's files, unless this run did nothing that they do not tell.

    Args:
        recipe: stored beside it; its home holds the run directories.
        history: has the stages' journals.
    """
    directory = run_directory(recipe)
    if all(stage.reused for stage in report.stages) and _is_told(report, directory):
        return directory
    draw_plots(plot_data(report, history), directory)
    rounds = [s.fingerprint for s in report.stages if s.name.startswith("rl_round")]
    if rounds:
        page = samples_page([shown_run(report.run, rounds, history)])
        atomic_write_bytes(directory / PAGE_NAME, page.encode())
    views = stage_views(history, [stage.fingerprint for stage in report.stages])
    write_diagnosis(diagnose(report.run, views, recipe.diagnosis), directory)
    atomic_write_bytes(directory / REPORT_MD, markdown(report, directory).encode())
    atomic_write_bytes(directory / REPORT_JSON, report.model_dump_json(indent=2).encode() + b"\n")
    return directory


def _is_told(report: Report, directory: Path) -> bool:
    """True if the last report in the directory has the same stages."""
    try:
        last = Report.model_validate_json((directory / REPORT_JSON).read_bytes())
    except (FileNotFoundError, ValidationError):
        return False
    return last.outputs == report.outputs and (directory / REPORT_MD).exists()


def plot_data(report: Report, history: StageHistory) -> PlotData:
    """Read the values of the plots from journals and commit records."""
    journals = {stage.name: history.records(stage.fingerprint, "")[0] for stage in report.stages}

    def of(label: str) -> list[Sequence[JournalRecord]]:
        return [journal for name, journal in journals.items() if name.startswith(label)]

    rounds = of("rl_round")
    return PlotData(
        loss=run_on(of("sft"), "train/loss"),
        reward_model=pair_curves(of("reward_model"), "reward_model"),
        preference=pair_curves(of("preference"), "preference"),
        reward=run_on(rounds, "critic/score/mean"),
        distillation=run_on(rounds, "distillation/loss"),
        lengths=run_on(rounds, "response_length/mean"),
        accuracy=_bars(report),
        step=median_step(rounds),
        seconds={stage.name: _phases(stage) for stage in report.stages if stage.job_seconds},
    )


def _bars(report: Report) -> list[Bar]:
    return [
        Bar(
            evaluated_name(stage.name).replace("rl_round_", "round ").replace("_", " "),
            stage.metrics["accuracy"],
            stage.metrics.get("accuracy_low"),
            stage.metrics.get("accuracy_high"),
        )
        for stage in report.stages
        if stage.name.startswith("evaluate") and "accuracy" in stage.metrics
    ]


def _phases(stage: StageReport) -> dict[str, float]:
    """Phases of a job, and what lies between them as `other`."""
    phases = {name: value for name, value in stage.job_seconds.items() if name != "total"}
    rest = stage.job_seconds.get("total", 0.0) - sum(phases.values())
    return phases | ({"other": rest} if rest > 0.0 else {})


def markdown(report: Report, directory: Path, *, embed: bool = False) -> str:
    """The report for people.

    Args:
        embed: put the plots into the text itself, for a page that cannot reach the files.
    """
    lines = [
        f"# {report.run}",
        "",
        _verdict(report),
        "",
        "| stage | | seconds | digest | metric |",
        "|---|---|---:|---|---|",
        *(
            f"| {stage.name} | {stage.state} | {stage.seconds:.1f} "
            f"| `{stage.digest[:12]}` | {headline_metric(stage.metrics)} |"
            for stage in report.stages
        ),
        "",
        *(f"`{s.name}` adopted {s.adopted}.\n" for s in report.stages if s.adopted),
        *(f"`{s.name}` was rejected: {s.rejected}.\n" for s in report.stages if s.rejected),
        *measured_tables({stage.name: stage.metrics for stage in report.stages}),
        *(line for stage in report.stages for line in source_table(stage.name, stage.metrics)),
    ]
    diagnosis = directory / DIAGNOSIS_PAGE
    if diagnosis.exists():
        address = diagnosis.as_uri() if embed else diagnosis.name
        lines += [f"[Diagnosis]({address}): {told_verdict(report.run, directory)}.", ""]
    for name, title in PLOT_TITLES.items():
        path = directory / f"{name}.svg"
        if path.exists():
            source = data_uri(path) if embed else path.name
            lines += [f"![{title}]({source})", ""]
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    parts = [f"{name.replace('_', ' ')} {value:.1%}" for name, value in report.accuracy.items()]
    accuracy = f"Held-out accuracy: {', '.join(parts)}. " if parts else ""
    promoted = ""
    if any(stage.name == "promote" for stage in report.stages):
        promoted = f"The model was {'promoted' if report.promoted else 'not promoted'}. "
    return f"{accuracy}{promoted}Wall time {report.seconds:.0f} s, seed {report.seed}."


def data_uri(path: Path) -> str:
    """An SVG file as an address that holds all of it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
