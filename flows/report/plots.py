"""The report's plots and their values: accuracy, curves of every trainer, time.

They are drawn as SVG for pages and as PNG for the rest.
Promises: a step has one point even if several attempts recorded it; a metric without records has no
curve. matplotlib is imported only where something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from infra.tracking.comparison import PAIR_ACCURACY
from infra.tracking.journal import JournalRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """Values over the steps of consecutive stages.

    Attributes:
        bounds: first steps of the stages after the first, drawn as lines.
        low: lower ends of the values' intervals, one per step, or empty.
    """

    steps: Sequence[float]
    values: Sequence[float]
    bounds: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class PairCurves:
    """Curves of stages that train on pairs of answers; a metric without records has none.

    Attributes:
        accuracy: share of a step's pairs whose chosen answer has the larger reward in the loss.
        held_out: that share of the held-out pairs, with intervals; step 0 is before training.
        margin: mean difference of the rewards of a step's pairs in the loss.
    """

    accuracy: Sequence[Curve] = ()
    held_out: Sequence[Curve] = ()
    loss: Sequence[Curve] = ()
    margin: Sequence[Curve] = ()


@dataclass(frozen=True)
class Bar:
    """A measured share in [0, 1] with its interval, if there is one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PlotData:
    """Everything that is drawn; an empty part is left out.

    Attributes:
        curves: one for each name of `CURVES`.
        preference: curves of preference training, in all iterations of self-play.
        step: seconds by phase of the median RL step, in the order of the loop.
        seconds: wall seconds by phase, per stage.
    """

    curves: Mapping[str, Curve] = field(default_factory=dict)
    reward_model: PairCurves = PairCurves()
    preference: PairCurves = PairCurves()
    accuracy: Sequence[Bar] = ()
    step: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


BLUE, ORANGE, GREY, GREEN = "#2563eb", "#ea580c", "#94a3b8", "#16a34a"
INK = "#0f172a"
PALETTE = ("#1d4ed8", "#3b82f6", "#93c5fd", "#ea580c", "#fdba74", "#16a34a", "#86efac", GREY)
SIZE_INCHES = (7.0, 3.2)
PNG_DPI = 150
MIN_SMOOTHED = 10
MAX_LINE_LABELS, MAX_LEVEL_LABELS = 5, 8
"""Numbers of bars above which labels have one word per line, and above which they are vertical."""
BAR_INCHES, AROUND_BARS_INCHES = 0.17, 1.2
"""Minimum height of a horizontal bar, and of the space around all bars."""
CURVES = {
    "reward": (
        *("rl_round", "critic/score/mean"),
        *("Reward while RL runs", "mean reward of a step", BLUE),
    ),
    "loss": ("sft", "train/loss", "Supervised loss", "loss per token", ORANGE),
    "distillation": (
        *("rl_round", "distillation/loss"),
        *("Distillation while RL runs", "loss", ORANGE),
    ),
    "lengths": (
        *("rl_round", "response_length/mean"),
        *("Response length while RL runs", "tokens", GREEN),
    ),
}
"""Label of the stages, metric, title, unit and colour of a curve over consecutive stages."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#64748b",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "svg.hashsalt": "rlhf",
    "svg.fonttype": "path",
}


Drawing = Callable[["Axes"], None]


def draw_plots(data: PlotData, directory: Path) -> list[Path]:
    """Write SVG and PNG files for every part with data; return the SVG files in report order."""
    drawings: dict[str, Drawing] = {}
    if data.accuracy:
        drawings["accuracy"] = partial(_draw_accuracy, bars=data.accuracy)
    for name, curve in data.curves.items():
        if curve.steps:
            _, _, title, ylabel, color = CURVES[name]
            drawings[name] = partial(
                _draw_curves, curves=[curve], title=title, ylabel=ylabel, color=color
            )
    drawings |= _pair_drawings("reward_model", "Reward model", data.reward_model)
    drawings |= _pair_drawings("preference", "Preferences", data.preference)
    if data.step:
        drawings["step"] = partial(_draw_step, phases=data.step)
    if data.seconds:
        drawings["time"] = partial(_draw_seconds, seconds=data.seconds)
    return [save_figure(directory / f"{name}.svg", draw) for name, draw in drawings.items()]


def save_figure(path: Path, draw: Drawing) -> Path:
    """Draw one plot as SVG, and as PNG beside it."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, whose current figure is global.
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        figure.savefig(path, metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=PNG_DPI)
    return path


def _pair_drawings(name: str, title: str, pairs: PairCurves) -> dict[str, Drawing]:
    """Return the drawings of a stage that trains on pairs, by the base name of their files."""
    drawings: dict[str, Drawing] = {}
    if pairs.accuracy or pairs.held_out:
        drawings[f"{name}_accuracy"] = partial(
            _draw_curves,
            curves=pairs.accuracy,
            title=f"{title}: pairs told apart",
            ylabel="pair accuracy",
            color=BLUE,
            held_out=pairs.held_out,
        )
    for part, curves, color in (("loss", pairs.loss, ORANGE), ("margin", pairs.margin, GREEN)):
        if curves:
            drawings[f"{name}_{part}"] = partial(
                _draw_curves,
                curves=curves,
                title=f"{title}: {part}",
                ylabel=f"mean {part} of a step",
                color=color,
            )
    return drawings


def _draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    title: str,
    ylabel: str,
    color: str,
    held_out: Sequence[Curve] | None = None,
) -> None:
    """Draw unconnected curves; with `held_out`, all are shares, and held-out ones are on top."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for curve in curves:
        _draw_steps(axes, curve, color)
    for curve in held_out or ():
        if len(curve.low) == len(curve.steps) == len(curve.high):
            axes.fill_between(
                curve.steps, curve.low, curve.high, color=INK, alpha=0.15, linewidth=0
            )
        label = "held-out pairs, with interval"
        axes.plot(curve.steps, curve.values, color=INK, linewidth=1.2, marker="o", label=label)
    for bound in {bound for curve in (*curves, *(held_out or ())) for bound in curve.bounds}:
        axes.axvline(bound - 0.5, color=GREY, linewidth=1, linestyle=":")
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    axes.ticklabel_format(axis="y", useOffset=False)
    if held_out is not None:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named.keys(), frameon=False, fontsize=8, loc="best")


def _draw_steps(axes: Axes, curve: Curve, color: str, width: int = 5) -> None:
    """Draw the value of each step; for a long curve also the mean over the last `width` steps."""
    steps, values = curve.steps, curve.values
    if len(values) < MIN_SMOOTHED:
        axes.plot(steps, values, color=color, linewidth=2, marker="o", label="each step")
        return
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    means = [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
    axes.plot(steps, means, color=color, linewidth=2, label=f"mean of {width} steps")


def _draw_accuracy(axes: Axes, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    rotation = 0 if len(bars) <= MAX_LEVEL_LABELS else 90
    colors = [GREY] + [BLUE] * (len(bars) - 1)
    axes.bar(places, [100 * bar.value for bar in bars], color=colors, width=0.6)
    for place, bar in zip(places, bars, strict=True):
        if bar.low is not None and bar.high is not None:
            axes.errorbar(
                place,
                100 * bar.value,
                yerr=[[100 * (bar.value - bar.low)], [100 * (bar.high - bar.value)]],
                color=INK,
                capsize=4,
                linewidth=1.2,
            )
        top = bar.high if bar.high is not None else bar.value
        axes.text(
            place, 100 * top + 2, f"{bar.value:.1%}", ha="center", va="bottom", rotation=rotation
        )
    broken = MAX_LINE_LABELS < len(bars) <= MAX_LEVEL_LABELS
    labels = [bar.label.replace(" ", "\n") if broken else bar.label for bar in bars]
    axes.set_xticks(list(places), labels, rotation=rotation)
    axes.set(
        title="Held-out accuracy after each stage",
        ylabel="%",
        ylim=(0, 130 if rotation else 112),
        yticks=range(0, 101, 20),
    )
    axes.grid(visible=False, axis="x")


def _draw_step(axes: Axes, phases: Mapping[str, float]) -> None:
    """Draw phases one below the other at their start times; those after the update are orange."""
    start, whole = 0.0, sum(phases.values())
    is_after_update = False
    for place, (phase, seconds) in enumerate(phases.items()):
        axes.barh(place, seconds, left=start, color=ORANGE if is_after_update else BLUE, height=0.6)
        label = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
        axes.text(start + seconds + 0.01 * whole, place, label, va="center", fontsize=8)
        start += seconds
        is_after_update |= phase == "update_actor"
    axes.set_yticks(range(len(phases)), list(phases))
    axes.invert_yaxis()
    axes.set(
        title="The median RL step; orange: until the next step samples",
        xlim=(0, 1.12 * whole),
        xlabel="seconds since the step began",
    )
    axes.grid(visible=False, axis="y")


def _draw_seconds(axes: Axes, seconds: Mapping[str, Mapping[str, float]]) -> None:
    phases = dict.fromkeys(name for each in seconds.values() for name in each)
    labels = list(seconds)
    left = [0.0] * len(labels)
    for phase, color in zip(phases, cycle(PALETTE), strict=False):
        widths = [seconds[label].get(phase, 0.0) for label in labels]
        axes.barh(labels, widths, left=left, label=phase, color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set(title="Where the time went", xlabel="seconds")
    axes.grid(visible=False, axis="y")
    figure = axes.get_figure(root=True)
    if figure is not None:
        figure.set_figheight(max(SIZE_INCHES[1], AROUND_BARS_INCHES + BAR_INCHES * len(labels)))
        figure.legend(ncols=4, fontsize=8, frameon=False, loc="outside lower center")


STEP_PHASES = (
    "gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv", "update_critic",
    "update_actor", "update_weights",
)  # fmt: skip
"""Phases of `timing_s/*`, in the order of the loop."""
IDLE_S = 5e-5
"""Phases shorter than this are not shown."""
HELD_OUT = f"val-core/{PAIR_ACCURACY}"

Journal = Sequence[JournalRecord]
Points = Mapping[int, Mapping[str, float]]
"""Values of the records that have a metric, by step, ascending."""


def run_on(journals: Sequence[Journal], metric: str) -> Curve:
    """Return one metric over consecutive rounds, with steps counted continuously.

    A round may count its steps from 1 or continue the count. The curve is empty without the metric.
    """
    values: list[float] = []
    bounds: list[float] = []
    for journal in journals:
        points = _points(journal, metric)
        if values and points:
            bounds.append(len(values) + 1)
        values += [found[metric] for found in points.values()]
    return Curve([*range(1, len(values) + 1)], values, bounds)


def pair_curves(journals: Sequence[Journal], trainer: str) -> PairCurves:
    """Return the curves of stages that train on pairs.

    Args:
        journals: one for each stage or iteration, in order; each counts from step 1.
        trainer: prefix of the metrics, `preference` or `reward_model`.
    """
    return PairCurves(
        accuracy=_stage_by_stage(journals, f"{trainer}/accuracy"),
        held_out=_stage_by_stage(journals, HELD_OUT),
        loss=_stage_by_stage(journals, "train/loss"),
        margin=_stage_by_stage(journals, f"{trainer}/margin"),
    )


def _stage_by_stage(journals: Sequence[Journal], metric: str) -> list[Curve]:
    """Return a separate curve for each stage, since each has its own reference and pairs."""
    curves: list[Curve] = []
    shift = 0
    for journal in journals:
        points = _points(journal, metric)
        if points:
            values, low, high = (
                [found[name] for found in points.values() if name in found]
                for name in (metric, f"{metric}_low", f"{metric}_high")
            )
            bounds = [shift + 1] if shift else []
            curves.append(Curve([shift + step for step in points], values, bounds, low, high))
        shift += max((record.step for record in journal if record.step is not None), default=0)
    return curves


def median_step(journals: Iterable[Journal]) -> dict[str, float]:
    """Return the seconds of each phase in the median training step, and the rest as `other`.

    Empty if no step trained.
    """
    steps = [
        record.values
        for journal in journals
        for record in journal
        if "timing_s/update_actor" in record.values
    ]
    if not steps:
        return {}
    medians = {
        phase: median(values.get(f"timing_s/{phase}", 0.0) for values in steps)
        for phase in STEP_PHASES
    }
    phases = {phase: seconds for phase, seconds in medians.items() if seconds >= IDLE_S}
    rest = median(values["timing_s/step"] for values in steps) - sum(phases.values())
    return phases | {"other": max(0.0, rest)}


def _points(journal: Journal, metric: str) -> Points:
    found = {
        record.step: record.values
        for record in journal
        if record.step is not None and metric in record.values
    }
    return dict(sorted(found.items()))
