"""The report's plots: reward, accuracy, lengths, time. SVG for pages, PNG for everything else.

matplotlib is imported here and only here, inside the drawing functions: a run that reuses every
stage and has its report already never pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY, GREEN = "#2563eb", "#ea580c", "#94a3b8", "#16a34a"
SIZE_INCHES = (7.0, 3.2)
PNG_DPI = 150
MIN_SMOOTHED = 10
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


@dataclass(frozen=True)
class Curve:
    """Values over the steps of one or more stages, laid end to end.

    Attributes:
        steps: step numbers, counted over all stages.
        values: one per step.
        bounds: first steps of the stages after the first, drawn as lines.
    """

    steps: Sequence[float]
    values: Sequence[float]
    bounds: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """One measured share with its interval.

    Attributes:
        label: name of the stage.
        value: in [0, 1].
        low: lower end of the interval, or None.
        high: upper end of the interval, or None.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PlotData:
    """Everything that is drawn; an empty part is left out.

    Attributes:
        loss: supervised loss per step.
        reward: mean reward per RL step.
        lengths: mean response length per RL step.
        accuracy: held-out accuracy per stage.
        step: seconds by phase of the median RL step, in the order of the loop.
        seconds: wall seconds by phase, per stage.
    """

    loss: Curve | None = None
    reward: Curve | None = None
    lengths: Curve | None = None
    accuracy: Sequence[Bar] = ()
    step: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def draw_plots(data: PlotData, directory: Path) -> list[Path]:
    """Write `<name>.svg` and `<name>.png` for every part that has data.

    Args:
        data: what to draw.
        directory: exists.

    Returns:
        The SVG files, in the order of a report.
    """
    drawings: list[tuple[str, Callable[[Axes], None]]] = []
    if data.accuracy:
        drawings.append(("accuracy", lambda axes: _draw_accuracy(axes, data.accuracy)))
    for name, curve, title, ylabel, color in (
        ("reward", data.reward, "Reward while RL runs", "mean reward of a step", BLUE),
        ("loss", data.loss, "Supervised loss", "loss per token", ORANGE),
        ("lengths", data.lengths, "Response length while RL runs", "tokens", GREEN),
    ):
        if curve and curve.steps:
            drawings.append((name, _curve_drawing(curve, title, ylabel, color)))
    if data.step:
        drawings.append(("step", lambda axes: _draw_step(axes, data.step)))
    if data.seconds:
        drawings.append(("time", lambda axes: _draw_seconds(axes, data.seconds)))
    return [save_figure(directory / f"{name}.svg", draw) for name, draw in drawings]


def save_figure(path: Path, draw: Callable[[Axes], None]) -> Path:
    """Draw one plot as SVG, and as PNG beside it.

    Args:
        path: of the SVG.
        draw: fills the axes.

    Returns:
        The path.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface, not pyplot: no global state, so it may run in any thread.
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        figure.savefig(path, metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=PNG_DPI)
    return path


def _curve_drawing(curve: Curve, title: str, ylabel: str, color: str) -> Callable[[Axes], None]:
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        if len(curve.values) < MIN_SMOOTHED:
            axes.plot(curve.steps, curve.values, color=color, linewidth=2, marker="o")
        else:
            mean = _moving_mean(curve.values)
            axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=1)
            axes.plot(curve.steps, mean, color=color, linewidth=2, label="mean of 5 steps")
            axes.legend(frameon=False, fontsize=8, loc="best")
        for bound in curve.bounds:
            axes.axvline(bound - 0.5, color=GREY, linewidth=1, linestyle=":")
        axes.set(title=title, xlabel="step", ylabel=ylabel)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))

    return draw


def _moving_mean(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of each value and those before it, so that no step sees its future."""
    return [
        sum(values[max(0, end - width) : end]) / min(end, width)
        for end in range(1, len(values) + 1)
    ]


def _draw_accuracy(axes: Axes, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    colors = [GREY] + [BLUE] * (len(bars) - 1)
    axes.bar(places, [100 * bar.value for bar in bars], color=colors, width=0.6)
    for place, bar in zip(places, bars, strict=True):
        if bar.low is not None and bar.high is not None:
            below, above = bar.value - bar.low, bar.high - bar.value
            axes.errorbar(
                place,
                100 * bar.value,
                yerr=[[100 * below], [100 * above]],
                color="#0f172a",
                capsize=4,
                linewidth=1.2,
            )
        top = bar.high if bar.high is not None else bar.value
        axes.text(place, 100 * top + 2, f"{bar.value:.1%}", ha="center", va="bottom")
    axes.set_xticks(list(places), [bar.label for bar in bars])
    axes.set(title="Held-out accuracy after each stage", ylabel="%", ylim=(0, 112))
    axes.grid(visible=False, axis="x")


def _draw_step(axes: Axes, phases: Mapping[str, float]) -> None:
    """Phases one below the other, each where it begins; those until the next token stand out."""
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
    axes.set(xlim=(0, 1.12 * whole), xlabel="seconds since the step began")
    axes.set_title("The median RL step; orange: until the next step samples")
    axes.grid(visible=False, axis="y")


def _draw_seconds(axes: Axes, seconds: Mapping[str, Mapping[str, float]]) -> None:
    phases = list(dict.fromkeys(name for each in seconds.values() for name in each))
    palette = ["#1d4ed8", "#3b82f6", "#93c5fd", "#ea580c", "#fdba74", "#16a34a", "#86efac", GREY]
    labels = list(seconds)
    left = [0.0] * len(labels)
    for index, phase in enumerate(phases):
        widths = [seconds[label].get(phase, 0.0) for label in labels]
        axes.barh(labels, widths, left=left, label=phase, color=palette[index % len(palette)])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title="Where the time went", xlabel="seconds")
    axes.grid(visible=False, axis="y")
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18))
