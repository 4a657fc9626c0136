"""Nightly flow: recompute a matrix of recipes, and compare the results with stored baselines.

rlhf nightly                              this file, in this process
prefect deployment run nightly-recipes    this file, in a worker; its schedule is in prefect.yaml

A night is shown as `night.md` and as an artifact on the run page, with plots of curves over the
stored runs, and of speed and memory as ratios.
Promises: what is shown changes no verdict; the page is on disk even if Prefect refuses it.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.flows import Flow

from flows.nightly import night as nights
from flows.nightly.measurement import Measurement, measure, read_baseline
from flows.nightly.night import Night, Outcome, judge
from flows.preflight import preflight
from flows.recipe.recipe import Recipe
from flows.report.page import show_page
from flows.report.plots import BLUE, GREY, ORANGE, save_figure
from flows.report.report import data_uri
from flows.rlhf_pipeline import rlhf_pipeline, stop_jobs
from infra import env
from infra.errors import PipelineError
from infra.redact import redact
from infra.store.atomic import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATRIX = (
    "quickstart", "ppo", "grpo", "dr_grpo", "dapo", "vapo", "gspo", "rloo", "reinforce_plus_plus",
    "remax", "pf_ppo", "lora_grpo",
)  # fmt: skip
"""Recipes of a night by default; each takes minutes on two cores."""
EVENTS = {"pass": "passed", "drift": "drifted", "fail": "failed"}
"""Last part of the event's name by verdict; automations can listen to the event."""


class NotReproducedError(PipelineError):
    """At least one recipe failed; the others were computed nevertheless."""


def _on_cancellation(flow: Flow[..., None], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001  (Prefect's signature)
    """Stop the jobs of a cancelled night, whichever recipe is running."""
    below = FlowRunFilterParentFlowRunId(any_=[flow_run.id])
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=below))
    for child in children:
        stop_jobs(rlhf_pipeline, child, state)


@flow(name="nightly-recipes", on_cancellation=[_on_cancellation], log_prints=False)
def nightly_recipes(
    recipes: list[str] = list(MATRIX),  # noqa: B006  never changed, and the UI's form shows it
    baselines: str = str(nights.BASELINES),
) -> None:
    """Compute recipes anew, and judge each against its baseline.

    Raises:
        NotReproducedError: a recipe failed; the results are in the night's directory.
    """
    matrix = nights.load_matrix(recipes)
    stored = {each.name: read_baseline(Path(baselines), each.name) for each in matrix}
    directory = nights.open_night(env.home(), _name())
    night = Night(name=directory.name, outcomes=())
    for recipe in matrix:
        measurement = _compute(nights.afresh(recipe, directory), night.name)
        verdict = judge(stored[recipe.name], measurement)
        outcome = Outcome(measurement=measurement, verdict=verdict)
        night = night.model_copy(update={"outcomes": (*night.outcomes, outcome)})
        nights.keep_night(directory, night)
        resource = {
            "prefect.resource.id": f"rlhf.nightly.{verdict.recipe}",
            "prefect.resource.name": verdict.recipe,
        }
        emit_event(f"rlhf.nightly.{EVENTS[verdict.word]}", resource, payload=verdict.model_dump())
    write_night(night, stored, directory)
    show_page("nightly", night.name, partial(markdown, night, stored, directory), directory)
    if night.failed:
        raise NotReproducedError(f"not reproduced: {', '.join(night.failed)}")


def _compute(recipe: Recipe, night: str) -> Measurement:
    try:
        recipe = preflight(recipe)
        rlhf_pipeline(recipe)
    except (PipelineError, OSError) as error:  # other recipes may still succeed
        return measure(recipe, night, redact(" ".join(str(error).split())))
    return measure(recipe, night)


def _name() -> str:
    """Return the night's name: creation time and part of the flow run's id; a retry keeps it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.created is None:
        raise RuntimeError("a night is a flow run; call nightly_recipes()")
    return f"{context.flow_run.created:%Y%m%dT%H%M%S}-{str(context.flow_run.id)[:8]}"


NIGHT_MD = "night.md"
MARKS = {"pass": "🟢 pass", "drift": "🟠 drift", "fail": "🔴 fail"}


def ratios(tonight: Measurement, stored: Measurement) -> dict[str, float]:
    """Return tonight's `speed` and `memory` relative to the median of the stored runs.

    A ratio is missing if either side lacks the value.
    """
    found = {}
    for name, of_stage, of_run in (
        ("speed", attrgetter("tokens_per_s"), statistics.geometric_mean),
        ("memory", attrgetter("peak_bytes"), max),
    ):
        runs = [list(filter(None, map(of_stage, run.stages.values()))) for run in stored.runs]
        before = [of_run(values) for values in runs if values]
        now = list(filter(None, map(of_stage, tonight.runs[-1].stages.values())))
        if now and before:
            found[name] = of_run(now) / statistics.median(before)
    return found


def draw_curve(outcome: Outcome, stored: Measurement | None, path: Path) -> None:
    """Plot rewards of the RL steps, or supervised losses, over the band of the stored runs.

    Losses are shown if the verdict names a supervised stage, or if there are no RL rounds. `path`
    is that of the SVG; a PNG is written beside it.
    """
    tonight, verdict = outcome.measurement.runs[-1], outcome.verdict
    labels = [label for label, stage in tonight.stages.items() if stage.curve]
    rounds = [label for label in labels if label.startswith("rl_round")]
    named = verdict.stage or verdict.drifted
    is_loss = bool(labels) and (not rounds or (named in labels and named not in rounds))
    labels = [label for label in labels if (label not in rounds) == is_loss]
    if not labels:
        return
    from matplotlib.ticker import MaxNLocator

    def draw(axes: "Axes") -> None:
        start = 1
        for label in labels:
            curve = tonight.stages[label].curve
            steps = range(start, start + len(curve))
            runs = [run.stages for run in stored.runs if label in run.stages] if stored else []
            _draw_band(axes, steps, [stages[label].curve for stages in runs])
            axes.plot(steps, curve, color=ORANGE if label == named else BLUE, linewidth=1.5)
            start += len(curve)
            if label != labels[-1]:
                axes.axvline(start - 0.5, color=GREY, linewidth=1, linestyle=":")
        ylabel = "loss per token" if is_loss else "mean reward of a step"
        axes.set(title=f"{verdict.recipe}: {verdict.word}", xlabel="step", ylabel=ylabel)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        if labels != [named]:
            axes.plot([], [], color=BLUE, label="tonight")
        if named in labels:
            axes.plot([], [], color=ORANGE, label=f"tonight, {named}")
        if stored:
            axes.fill_between([], [], color=GREY, alpha=0.5, label="stored runs")
        axes.legend(frameon=False, fontsize=8, loc="best")

    save_figure(path, draw)


def _draw_band(axes: "Axes", steps: range, curves: Sequence[Sequence[float]]) -> None:
    alike = [curve for curve in curves if len(curve) == len(steps)]
    if alike:
        low = [min(values) for values in zip(*alike, strict=True)]
        high = [max(values) for values in zip(*alike, strict=True)]
        # A line as well, because a band of equal runs has no height.
        axes.fill_between(steps, low, high, color=GREY, alpha=0.5, linewidth=0)
        axes.plot(steps, high, color=GREY, linewidth=4, alpha=0.5)


def draw_ratios(night: Night, stored: Mapping[str, Measurement | None], path: Path) -> None:
    """Plot speed and memory of each recipe relative to the stored median, as SVG and PNG."""
    found = {
        each.verdict.recipe: values
        for each in night.outcomes
        if (before := stored[each.verdict.recipe]) and (values := ratios(each.measurement, before))
    }
    if not found:
        return

    def draw(axes: "Axes") -> None:
        for offset, (name, color) in enumerate((("speed", BLUE), ("memory", ORANGE))):
            places = [index + 0.38 * offset - 0.19 for index in range(len(found))]
            values = [each.get(name, 0.0) for each in found.values()]
            axes.barh(places, values, height=0.36, color=color, label=name)
            for place, value in zip(places, values, strict=True):
                axes.text(value, place, f" {value:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set(title="Speed and memory, tonight / median of the stored runs")
        axes.grid(visible=False, axis="y")
        axes.legend(
            ncols=2, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1)
        )
        axes.margins(x=0.15)

    save_figure(path, draw)


def write_night(night: Night, stored: Mapping[str, Measurement | None], directory: Path) -> None:
    """Write the page and its plots; `stored` has the baseline of each recipe."""
    draw_ratios(night, stored, directory / "ratios.svg")
    for each in night.outcomes:
        name = each.verdict.recipe
        draw_curve(each, stored[name], directory / f"curve-{name}.svg")
    atomic_write_bytes(directory / NIGHT_MD, markdown(night, stored, directory).encode())


def markdown(
    night: Night, stored: Mapping[str, Measurement | None], directory: Path, *, embed: bool = False
) -> str:
    """Return the page of a night; `embed` puts the plots into the text as data URIs."""
    words = [each.verdict.word for each in night.outcomes]
    lines = [
        f"# Night {night.name}",
        "",
        ", ".join(f"{words.count(word)} {mark}" for word, mark in MARKS.items()),
        "",
        "| recipe | verdict | stage | accuracy | stored | speed | memory |",
        "|---|---|---|---:|---:|---:|---:|",
        *(_row(each, stored[each.verdict.recipe]) for each in night.outcomes),
        "",
        *(line for each in night.outcomes for line in _findings(each)),
    ]
    for path in [directory / "ratios.svg", *sorted(directory.glob("curve-*.svg"))]:
        if path.exists():
            lines += [f"![{path.stem}]({data_uri(path) if embed else path.name})", ""]
    return "\n".join(lines)


def _row(outcome: Outcome, stored: Measurement | None) -> str:
    verdict = outcome.verdict
    found = ratios(outcome.measurement, stored) if stored else {}
    speed, memory = (f"{found[name]:.2f}" if name in found else "" for name in ("speed", "memory"))
    return (
        f"| {verdict.recipe} | {MARKS[verdict.word]} | {verdict.stage} "
        f"| {_accuracy(outcome.measurement)} | {_accuracy(stored)} "
        f"| {speed} | {memory} |"
    )


def _accuracy(measurement: Measurement | None) -> str:
    stages = measurement.runs[-1].stages.values() if measurement else ()
    values = [stage.accuracy for stage in stages if stage.accuracy is not None]
    return f"{values[-1]:.1%}" if values else ""


def _findings(outcome: Outcome) -> list[str]:
    verdict = outcome.verdict
    drifted = []
    if verdict.drifted:
        drifted = [f"the first stage with another digest: `{verdict.drifted}`"]
        drifted += [f"differs: {cause}" for cause in verdict.causes]
    found = [f"- {each}" for each in (*verdict.problems, *drifted, *verdict.notes)]
    return [f"**{verdict.recipe}**", "", *found, ""] if found else []
