"""The page of samples that a policy wrote, step by step, alone or beside another run.

Promises: one file without external resources. Samples cannot inject markup or scripts: they are
JSON with escaped tags, the page inserts them as text, and its policy allows only its own script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from flows.diagnosis.findings import finite_points
from flows.diagnosis.rules import CURVES
from infra.tracking.journal import StageHistory
from infra.tracking.samples import KeptSample, read_samples, within

PAGE_NAME = "samples.html"
MARKDOWN_SAMPLES, MARKDOWN_CHARS = 16, 2000
MAX_RUN_BYTES = 16 * 2**20
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


@dataclass(frozen=True)
class ShownRun:
    """A run as the page shows it; `steps` may have fewer than `num_steps`, to limit its size."""

    name: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    steps: Mapping[int, Sequence[KeptSample]]
    num_steps: int


def shown_run(name: str, rounds: Sequence[str], history: StageHistory) -> ShownRun:
    """Read the stored samples and curves of RL rounds by their fingerprints."""
    values: dict[int, Mapping[str, float]] = {}
    steps: dict[int, Sequence[KeptSample]] = {}
    for fingerprint in rounds:
        for record in history.records(fingerprint, "")[0]:
            if record.step is not None:
                values[record.step] = {**values.get(record.step, {}), **record.values}
        steps |= read_samples(history.storage, fingerprint)
    return ShownRun(
        name,
        {title: finite_points(values, metrics)[1] for title, metrics in CURVES.items()},
        within(steps, MAX_RUN_BYTES),
        len(steps),
    )


def samples_page(runs: Sequence[ShownRun]) -> str:
    """Return the page of one run, or of two to compare."""
    page = files("flows.report").joinpath("samples.html").read_text("utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # The data cannot close the element that holds them.
    plain = [
        {
            **asdict(run),
            "steps": {
                step: [sample.model_dump(mode="json") for sample in kept]
                for step, kept in run.steps.items()
            },
        }
        for run in runs
    ]
    data = json.dumps(plain, allow_nan=False).translate(_ESCAPES)
    return page.replace("SCRIPT_DIGEST", digest, 1).replace("PAGE_DATA", data, 1)


def samples_markdown(page: str, path: Path) -> str:
    """Return a few samples of the last step as Markdown, inside fences that no text can close."""
    (run,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    lines = [f"# {run['name']}: samples", "", f"All of them: [{path}]({path.as_uri()})", ""]
    for step in list(run["steps"])[-1:]:
        lines += [f"## Step {step}", ""]
        for sample in run["steps"][step][:MARKDOWN_SAMPLES]:
            text = "".join((sample["prompt"], *sample["tokens"]))[:MARKDOWN_CHARS]
            fence = "`" * (1 + max(map(len, re.findall("`{2,}", text)), default=2))
            told = {name: sample[name] for name in ("score", "advantage", "num_tokens")}
            facts = ", ".join(f"{name} {value}" for name, value in told.items())
            lines += [facts, "", f"{fence}text", text, fence, ""]
    return "\n".join(lines)
