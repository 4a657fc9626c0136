"""The report of a pipeline run: stages, times, and results of evaluations and comparisons.

`<home>/runs/<run name>/` has `report.json`, `report.md`, the plots as SVG and PNG, `samples.html`,
`diagnosis.html`, and from the beginning of the run `recipe.json`, the resolved recipe.
Promises: the time of a reused stage is that of its job. A run that reuses every stage does not
change an existing report of the same stages. Metrics in tables are those of the stages'
commit records. A run with one final evaluation and no comparison has no table of evaluations.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from flows.diagnosis.diagnosis import DIAGNOSIS_PAGE, diagnose, told_verdict, write_diagnosis
from flows.diagnosis.findings import stage_views
from flows.recipe.recipe import Recipe
from flows.report.plots import (
    CURVES,
    Bar,
    PlotData,
    draw_plots,
    median_step,
    pair_curves,
    run_on,
)
from flows.report.samples import PAGE_NAME, samples_page, shown_run
from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.canonical import canonical_json
from infra.store.stage_spec import Adoption
from infra.tracking.comparison import (
    BEFORE,
    GAIN,
    MARGIN,
    NUM_PAIRS,
    PAIR_ACCURACY,
    PAIR_MARGIN,
    verdicts,
)
from infra.tracking.journal import JournalRecord, StageHistory
from tasks.runner.run import StageResult, headline_metric

REPORT_JSON = "report.json"
REPORT_MD = "report.md"
RECIPE_JSON = "recipe.json"
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
    """Wall seconds that this run waited, or of the job whose output is reused."""
    digest: str
    fingerprint: str
    metrics: dict[str, float]
    job_seconds: dict[str, float]
    """Seconds of the job's phases when it was computed."""
    adopted: Adoption | None = None
    """Half-trained work of another fingerprint that the stage continued."""
    rejected: str = ""
    """Symptom for which a round's policy was rejected; empty if it was accepted."""

    @property
    def state(self) -> str:
        """Outcome in one word."""
        return "rejected" if self.rejected else "reused" if self.reused else "ran"


class Report(BaseModel, frozen=True):
    """Content of `report.json`."""

    run: str
    recipe: str
    seed: int
    finished_at: str
    """UTC, ISO 8601."""
    seconds: float
    """Wall seconds from the opening of the run to this report."""
    stages: list[StageReport]
    accuracy: dict[str, float]
    """Held-out accuracy by training stage, then of the final model and others.

    `final` is the final model, `against` and `incumbent` are models that it was compared with.
    Suites have their own entries, `<suite>` and `<suite>_against`.
    """
    promoted: bool

    @property
    def outputs(self) -> list[tuple[str, str, str]]:
        """Fingerprint, digest and rejection of each stage, which determine the plots."""
        return [(stage.fingerprint, stage.digest, stage.rejected) for stage in self.stages]


def make_run_directory(recipe: Recipe) -> Path:
    """Create the directory of a run's report, with `recipe.json` in it."""
    directory = recipe.home / "runs" / recipe.run_name
    make_directories(directory)
    atomic_write_bytes(directory / RECIPE_JSON, canonical_json(recipe))
    return directory


def build_report(
    recipe: Recipe,
    results: Sequence[StageResult],
    seconds: float,
    rejected: Mapping[str, str] = {},
) -> Report:
    """Build the report of a finished run; `rejected` has symptoms by label of a rejected round."""
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
                seconds=result.job_seconds.get("total", result.wall_s)
                if result.reused
                else result.wall_s,
                digest=result.artifact.digest,
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
    """Number equal labels, which a user's flow may have: `sft`, `sft_2`, `sft_3`."""
    names: list[str] = []
    for label in labels:
        numbered = (label, *(f"{label}_{number}" for number in range(2, len(labels) + 2)))
        names.append(next(name for name in numbered if name not in names))
    return names


def evaluated_name(label: str) -> str:
    """Return the name of the evaluated model: `sft` for `evaluate_sft`, `final` for `evaluate`."""
    return label.removeprefix("evaluate").removeprefix("_") or "final"


def write_report(report: Report, recipe: Recipe, history: StageHistory) -> Path:
    """Write the report's files, unless nothing was computed and they are up to date."""
    directory = make_run_directory(recipe)
    if all(stage.reused for stage in report.stages) and _is_up_to_date(report, directory):
        return directory
    draw_plots(plot_data(report, history), directory)
    rounds = [s.fingerprint for s in report.stages if s.name.startswith("rl_round")]
    if rounds:
        atomic_write_bytes(
            directory / PAGE_NAME, samples_page([shown_run(report.run, rounds, history)]).encode()
        )
    views = stage_views(history, [stage.fingerprint for stage in report.stages])
    write_diagnosis(diagnose(report.run, views, recipe.diagnosis), directory)
    atomic_write_bytes(directory / REPORT_MD, markdown(report, directory).encode())
    atomic_write_bytes(directory / REPORT_JSON, report.model_dump_json(indent=2).encode() + b"\n")
    return directory


def _is_up_to_date(report: Report, directory: Path) -> bool:
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

    return PlotData(
        curves={name: run_on(of(label), metric) for name, (label, metric, *_) in CURVES.items()},
        reward_model=pair_curves(of("reward_model"), "reward_model"),
        preference=pair_curves(of("preference"), "preference"),
        accuracy=[
            Bar(
                evaluated_name(stage.name).replace("rl_round_", "round ").replace("_", " "),
                stage.metrics["accuracy"],
                stage.metrics.get("accuracy_low"),
                stage.metrics.get("accuracy_high"),
            )
            for stage in report.stages
            if stage.name.startswith("evaluate") and "accuracy" in stage.metrics
        ],
        step=median_step(of("rl_round")),
        seconds={stage.name: _phases(stage) for stage in report.stages if stage.job_seconds},
    )


def _phases(stage: StageReport) -> dict[str, float]:
    phases = {name: value for name, value in stage.job_seconds.items() if name != "total"}
    rest = stage.job_seconds.get("total", 0.0) - sum(phases.values())
    return phases | ({"other": rest} if rest > 0.0 else {})


def markdown(report: Report, directory: Path, *, embed: bool = False) -> str:
    """Return the report as Markdown; `embed` puts the plots into the text as data URIs."""
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
    """Return an SVG file as a data URI."""
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


EVALUATION, COMPARISON, HARNESS, OF_SUITE = "evaluate", "compare", "harness_", "preprocess_"
"""Label prefixes of these stages; the last one makes the dataset of a suite."""
PREFIX = "source/"
"""Metrics are `source/<name>/<metric>`; the name may contain a `/`, the metric must not."""
BOUNDS = ("_low", "_high")
"""Suffixes of a metric for the ends of its interval."""

Stages = Mapping[str, Mapping[str, float]]
"""Metrics by stage label."""


def measured_tables(stages: Stages) -> list[str]:
    """Return Markdown lines: pair accuracy, evaluations, harness tasks and comparisons."""
    evaluations = {each: found for each, found in stages.items() if each.startswith(EVALUATION)}
    comparisons = {each: found for each, found in stages.items() if each.startswith(COMPARISON)}
    has_suites = any(label.startswith(OF_SUITE) for label in stages)
    return [
        *_table(
            "| trained on pairs | held out "
            "| pair accuracy before | after | margin before | after |",
            "|---|---:|---:|---:|---:|---:|",
            (
                (
                    label,
                    f"{metrics.get(NUM_PAIRS, 0):.0f}",
                    _share(metrics, BEFORE + PAIR_ACCURACY),
                    _share(metrics, PAIR_ACCURACY),
                    _number(metrics, BEFORE + PAIR_MARGIN),
                    _number(metrics, PAIR_MARGIN),
                )
                for label, metrics in stages.items()
                if PAIR_ACCURACY in metrics
            ),
        ),
        *(_shares("evaluation", evaluations) if has_suites or comparisons else []),
        *_table(
            "| harness | metric | value | interval |",
            "|---|---|---:|---|",
            (
                (label, name, f"{value:.4g}", _interval(metrics, name))
                for label, metrics in stages.items()
                if label.startswith(HARNESS)
                for name, value in sorted(metrics.items())
                if "/" in name and not name.endswith(BOUNDS)
            ),
        ),
        *_table(
            "| comparison | metric | gain | chance gives | |",
            "|---|---|---:|---:|---|",
            (
                (
                    label,
                    metric,
                    f"{metrics[GAIN + metric]:+.4f}",
                    f"{metrics[MARGIN + metric]:.4f}",
                    verdict,
                )
                for label, metrics in comparisons.items()
                for metric, verdict in verdicts(metrics).items()
            ),
        ),
    ]


def source_table(stage: str, metrics: Mapping[str, float]) -> list[str]:
    """Return Markdown lines with a row for each data source; empty if there are none."""
    sources: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in metrics.items():
        if key.startswith(PREFIX):
            source, _, name = key.removeprefix(PREFIX).rpartition("/")
            sources[source][name] = value
    lines = _shares("data source", dict(sorted(sources.items())))
    return [f"`{stage}` by data source:", "", *lines] if lines else []


def _shares(what: str, found: Stages) -> list[str]:
    """Return a table with a row for each entry of `found` and a column for each shown metric.

    The shown metrics are the accuracy, and metrics at k.
    """
    names = sorted(
        {
            name
            for metrics in found.values()
            for name in metrics
            if name == "accuracy"
            or ("@" in name and not name.endswith(BOUNDS) and not name.startswith(PREFIX))
        }
    )
    rows = (
        (
            label.replace("|", "&#124;"),
            f"{metrics.get('num_problems', 0):.0f}",
            *(_share(metrics, name) for name in names),
        )
        for label, metrics in found.items()
    )
    title = f"| {what} | problems | {' | '.join(names)} |"
    return _table(title, "|---|---:" + "|---:" * len(names) + "|", rows)


def _table(title: str, align: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return Markdown lines; empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [title, align, *lines, ""] if lines else []


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _interval(metrics: Mapping[str, float], name: str) -> str:
    """Return the interval of a metric; empty if the harness has no standard error."""
    ends = [f"{metrics[name + bound]:.4g}" for bound in BOUNDS if name + bound in metrics]
    return f"[{', '.join(ends)}]" if ends else ""


def _share(found: Mapping[str, float], name: str) -> str:
    """Return a value with its interval as a table cell; empty if the metric is missing.

    Shares are in percent, best-of-k scores as they are.
    """
    if name not in found:
        return ""
    values = [found[name], *(found[name + bound] for bound in BOUNDS if name + bound in found)]
    shown = [f"{value:.3g}" if name.startswith("best@") else f"{value:.1%}" for value in values]
    return f"{shown[0]} [{', '.join(shown[1:])}]" if len(shown) > 1 else shown[0]
