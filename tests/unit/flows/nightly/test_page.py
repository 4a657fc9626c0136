"""The page of a night: every verdict with its reasons, and plots that can be drawn."""

import math
import random
from pathlib import Path

import pytest

from flows.nightly.measurement import Machine, Made, Measurement, Observed, Run
from flows.nightly.night import Night, Outcome, judge
from flows.nightly.nightly_recipes import NIGHT_MD, markdown, ratios, write_night

MACHINE = Machine(
    platform="cpu",
    device_kind="x86_64",
    processor="a processor",
    num_cores=2,
    memory_gib=8,
    system="Linux x86_64",
)
ROUNDS = ("rl_round_1", "rl_round_2")


def run(night: str, final: float, jitter: float = 0.02, speed: float = 900.0) -> Run:
    """Rewards that rise to `final` over two rounds."""
    noise = random.Random(night)
    rewards = [
        final * (1 - math.exp(-step / 15)) + noise.uniform(-jitter, jitter) for step in range(40)
    ]
    stages = {
        label: Observed(
            curve=tuple(rewards[20 * number : 20 * number + 20]), tokens_per_s=speed, peak_bytes=1e9
        )
        for number, label in enumerate(ROUNDS)
    }
    return Run(night=night, stages={**stages, "evaluate": Observed(accuracy=final)})


def measured(recipe: str, *runs: Run, digest: str = "1", problem: str = "") -> Measurement:
    return Measurement(
        recipe=recipe,
        machine=MACHINE,
        settings={},
        stages={
            label: Made(digest=digest, settings="", sources=label, libraries={})
            for label in (*ROUNDS, "evaluate")
        },
        sources={label: {"engines/algorithms/kl.py": digest} for label in (*ROUNDS, "evaluate")},
        runs=runs,
        stopped_at="evaluate" if problem else "",
        problem=problem,
    )


def a_night(directory: Path) -> tuple[Night, dict[str, Measurement | None]]:
    stored: dict[str, Measurement | None] = {
        name: measured(name, *(run(f"{number}", 0.9) for number in range(3)))
        for name in ("grpo", "rloo", "remax", "ppo")
    }
    tonight = [
        measured("grpo", run("2", 0.9)),
        measured("rloo", run("tonight", 0.9, speed=800.0), digest="2"),
        measured("remax", run("tonight", 0.5), digest="2"),
        measured("ppo", run("tonight", 0.9), problem="the job ended without its output"),
        measured("new", run("tonight", 0.9)),
    ]
    stored["new"] = None
    night = Night(
        name=directory.name,
        outcomes=tuple(
            Outcome(measurement=each, verdict=judge(stored[each.recipe], each)) for each in tonight
        ),
    )
    return night, stored


def test_a_page_tells_verdicts_and_reasons(tmp_path: Path) -> None:
    night, stored = a_night(tmp_path)
    write_night(night, stored, tmp_path)
    page = (tmp_path / NIGHT_MD).read_text(encoding="utf-8")
    assert "1 🟢 pass, 2 🟠 drift, 2 🔴 fail" in page
    assert "| grpo | 🟢 pass |  | 90.0% | 90.0% | 1.00 | 1.00 |" in page
    assert "| rloo | 🟠 drift | rl_round_1 | 90.0% | 90.0% | 0.89 | 1.00 |" in page
    assert "| remax | 🔴 fail | rl_round_1 | 50.0% | 90.0% | 1.00 | 1.00 |" in page
    assert "- differs: sources: engines/algorithms/kl.py" in page
    assert "- evaluate: the job ended without its output" in page
    assert "no baseline is stored" in page
    for name in ("ratios", *(f"curve-{each.verdict.recipe}" for each in night.outcomes)):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert f"({name}.svg)" in page
    assert "data:image/svg+xml;base64," in markdown(night, stored, tmp_path, embed=True)


def test_a_night_whose_recipes_did_not_begin_has_a_page(tmp_path: Path) -> None:
    empty = measured("grpo", Run(night="1", stages={}), problem="no such file")
    night = Night(name="1", outcomes=(Outcome(measurement=empty, verdict=judge(None, empty)),))
    write_night(night, {"grpo": None}, tmp_path)
    assert "no such file" in (tmp_path / NIGHT_MD).read_text(encoding="utf-8")
    assert not [*tmp_path.glob("*.svg")]


def test_ratios_are_of_medians() -> None:
    stored = measured("grpo", run("1", 0.9, speed=100.0), run("2", 0.9, speed=300.0))
    assert ratios(measured("grpo", run("3", 0.9, speed=400.0)), stored)["speed"] == pytest.approx(
        2.0
    )
    assert ratios(measured("grpo", Run(night="1", stages={})), stored) == {}
