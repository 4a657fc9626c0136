"""The diagnosis of a run, and its offline page, Markdown for the run page and terminal text.

Findings are sorted by cause: resources, then communication, then the algorithm. A lost replica
makes steps slow, and weights that do not arrive make rewards fall.
Promises: the page has no script and no external resource; text of logs and errors is escaped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path

from engines.config.recipe import DiagnosisConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.diagnosis.findings import Finding, Points, StageView, points
from flows.diagnosis.rules import (
    CURVES,
    LOSS,
    PEAK_MEMORY,
    SKIPPED,
    STEP,
    loss_findings,
    poisoned_findings,
    resource_findings,
    round_findings,
    time_findings,
)
from infra.store.atomic import atomic_write_bytes

AREAS = ("resources", "communication", "algorithm")
_SEVERITIES = ("failed", "sick", "note")


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a run, sorted by area in the order of `AREAS`, then by severity."""

    run: str
    stages: Sequence[StageView]
    findings: Sequence[Finding]

    @property
    def ills(self) -> list[Finding]:
        """Findings more severe than a note."""
        return [finding for finding in self.findings if finding.severity != "note"]

    @property
    def verdict(self) -> str:
        """Summary of the run in one line."""
        places: dict[str, dict[str, None]] = {}
        for finding in self.ills:
            places.setdefault(finding.symptom, {})[finding.place] = None
        names = [f"{symptom} ({', '.join(found)})" for symptom, found in places.items()]
        return f"{self.run}: {', '.join(names) or 'no findings'}"


def diagnose(run: str, stages: Sequence[StageView], thresholds: DiagnosisConfig) -> Diagnosis:
    """Diagnose a run, finished or not; `stages` are in order."""
    found: list[Finding] = []
    of_rounds: list[Finding] = []
    accepted: list[StageView] = []
    evaluations = _evaluations(stages)
    for stage in stages:
        found += resource_findings(stage, thresholds)
        found += time_findings(stage, thresholds)
        found += poisoned_findings(stage)
        if isinstance(stage.config, SFTStageConfig):
            found += loss_findings(stage, thresholds)
        if not isinstance(stage.config, RLRoundStageConfig) or not stage.steps:
            continue
        shown = symptoms([*accepted, stage], stages, thresholds)  # compared with accepted rounds
        scored = evaluations.get(stage.label)
        is_judged = stage.is_committed and scored is not None and scored.is_committed
        is_rejected = is_judged and bool(rejecting(shown, thresholds))
        of_rounds += [replace(finding, rejected=is_rejected) for finding in shown]
        if not is_rejected:
            accepted.append(stage)
    return Diagnosis(
        run,
        stages,
        sorted(
            [*found, *of_rounds], key=lambda f: (AREAS.index(f.area), _SEVERITIES.index(f.severity))
        ),
    )


def rejecting(found: Sequence[Finding], thresholds: DiagnosisConfig) -> list[Finding]:
    """Return the findings that reject a round, in the order in which the recipe names them."""
    shown = {finding.symptom: finding for finding in found}
    return [shown[name] for name in thresholds.reject_round if name in shown]


def symptoms(
    rounds: Sequence[StageView], stages: Sequence[StageView], thresholds: DiagnosisConfig
) -> list[Finding]:
    """Return the findings of the last of `rounds`; their evaluations are among `stages`."""
    known = {"sft", *(each.label for each in rounds)}
    evaluations = {
        of: stage
        for of, stage in _evaluations(stages).items()
        if of in known or re.fullmatch(r"preference(_\d+)?", of)
    }
    return round_findings(rounds, evaluations, thresholds)


def _evaluations(stages: Sequence[StageView]) -> Mapping[str, StageView]:
    return {
        stage.config.of: stage for stage in stages if isinstance(stage.config, EvaluateStageConfig)
    }


DIAGNOSIS_PAGE, DIAGNOSIS_MD = "diagnosis.html", "diagnosis.md"
SHOWN = {
    **CURVES,
    "loss": (LOSS,),
    "steps skipped": (SKIPPED,),
    "seconds of a step": (STEP,),
    "peak memory, GB": (PEAK_MEMORY,),
}
"""Metrics by the title of their plot; the first that a run has is shown."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 260, 110, 46, 16
_STYLE = """
body { margin: 0 auto; max-width: 1100px; padding: 12px 20px; color: #0f172a; background: #f8fafc;
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 18px; overflow-wrap: anywhere; } h2 { font-size: 15px; margin: 18px 0 6px; }
.plots { display: flex; flex-wrap: wrap; gap: 10px; }
.plots div, article { background: #fff; border: 1px solid #e2e8f0; border-radius: 6px;
  padding: 6px 10px; }
.plots b { font-size: 12px; } svg { display: block; } article { margin: 8px 0; }
.failed { border-left: 4px solid #dc2626; } .sick { border-left: 4px solid #ea580c; }
.note { border-left: 4px solid #94a3b8; }
article span, article li { color: #475569; font-size: 13px; } p { margin: 4px 0;
  overflow-wrap: anywhere; } ul { margin: 2px 0; padding-left: 18px; }
"""


def write_diagnosis(diagnosis: Diagnosis, directory: Path) -> Path:
    """Write and return the page; write `diagnosis.md` if there are `ills`, else remove it."""
    path, told = directory / DIAGNOSIS_PAGE, directory / DIAGNOSIS_MD
    atomic_write_bytes(path, html_page(diagnosis).encode())
    if diagnosis.ills:
        atomic_write_bytes(told, markdown(diagnosis, path).encode())
    else:
        told.unlink(missing_ok=True)
    return path


def told_verdict(run: str, directory: Path) -> str:
    """Return the symptoms of the last written diagnosis and their stages, as text."""
    try:
        first = (directory / DIAGNOSIS_MD).read_text("utf-8").partition("\n")[0]
    except FileNotFoundError:
        return "no findings"
    return first.removeprefix(f"# {run}: ")


def html_page(diagnosis: Diagnosis) -> str:
    """Return the page as HTML."""
    rounds = [view for view in diagnosis.stages if isinstance(view.config, RLRoundStageConfig)]
    others = [view for view in diagnosis.stages if view not in rounds]
    plots = "".join(
        f"<div><b>{escape(title)}</b>{_plot(curve)}</div>"
        for title, names in SHOWN.items()
        if len(curve := points(rounds, *names)[1] or points(others, *names)[1]) > 1
    )
    areas = "".join(
        f"<h2>{area}</h2>{''.join(map(_article, found))}" for area, found in _areas(diagnosis)
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>Diagnosis</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>{escape(diagnosis.verdict)}</h1><div class="plots">{plots}</div>{areas}'
        "</body></html>\n"
    )


def markdown(diagnosis: Diagnosis, path: Path) -> str:
    """Return the diagnosis as Markdown for the run page, with text of logs escaped as code."""
    lines = [f"# {diagnosis.verdict}", "", f"With curves: [{path}]({path.as_uri()})", ""]
    for area, found in _areas(diagnosis):
        lines += [f"## {area}", ""]
        for finding in found:
            numbers = "; ".join(map(str, finding.evidence))
            lines += [
                f"* **{finding.symptom}** ({finding.severity}), {finding.place}: "
                f"{_as_code(finding.text)}{f' [{numbers}]' if numbers else ''}",
                *(f"    1. {_as_code(step)}" for step in finding.next),
            ]
        lines.append("")
    return "\n".join(lines)


def text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text for the terminal."""
    lines = [diagnosis.verdict]
    for area, found in _areas(diagnosis):
        lines += ["", area]
        for finding in found:
            mark = {"failed": "!!", "sick": "! "}.get(finding.severity, "  ")
            lines.append(f"{mark} {finding.place}: {finding.symptom}: {finding.text}")
            lines += [f"       {number}" for number in finding.evidence]
            if finding.severity != "note":
                lines += [f"    next: {step}" for step in finding.next]
    return "\n".join(lines) + "\n"


def _areas(diagnosis: Diagnosis) -> list[tuple[str, list[Finding]]]:
    return [(area, [*found]) for area, found in groupby(diagnosis.findings, lambda f: f.area)]


def _as_code(said: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`+", said)), default=0))
    return f"{fence} {' '.join(said.split())} {fence}"


def _article(finding: Finding) -> str:
    numbers = "; ".join(map(str, finding.evidence))
    steps = "".join(f"<li>{escape(step)}</li>" for step in finding.next)
    return (
        f'<article class="{finding.severity}"><b>{escape(finding.symptom)}</b> '
        f"<span>{escape(finding.place)}</span><p>{escape(finding.text)}</p>"
        f"<span>{escape(numbers)}</span><ul>{steps}</ul></article>"
    )


def _plot(curve: Points) -> str:
    steps, values = zip(*curve, strict=True)
    low, high = min(values), max(values)
    span_x, span_y = max(1, steps[-1] - steps[0]), (high - low) or 1.0
    inner_x, inner_y = _WIDTH - _LEFT - 6, _HEIGHT - _BOTTOM - 6
    line = " ".join(
        f"{_LEFT + inner_x * (step - steps[0]) / span_x:.1f},"
        f"{6 + inner_y * (high - value) / span_y:.1f}"
        for step, value in curve
    )
    labels: Sequence[tuple[float, float, str, str]] = (
        (_LEFT - 3, 14, "end", f"{high:.3g}"),
        (_LEFT - 3, _HEIGHT - _BOTTOM, "end", f"{low:.3g}"),
        (_LEFT, _HEIGHT - 3, "start", str(steps[0])),
        (_WIDTH - 6, _HEIGHT - 3, "end", str(steps[-1])),
    )
    texts = "".join(
        f'<text x="{x}" y="{y}" font-size="10" fill="#64748b" text-anchor="{anchor}">{said}</text>'
        for x, y, anchor, said in labels
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}">{texts}'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="1.5"/></svg>'
    )
