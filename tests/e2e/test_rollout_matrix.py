"""The quickstart on every engine of an environment of its own, in every place."""

import time
from pathlib import Path
from statistics import median

import pytest
from test_environments import needed
from tiny_pipeline import Home

pytestmark = [pytest.mark.matrix, pytest.mark.exclusive]

GATE = 0.9
"""Of the recipe."""
DEADLINE_S = 3600.0
PHASES = ("update_weights", "gen", "update_actor")
PLACES = {
    "colocated": ("rollout.placement=colocated",),
    "disaggregated": ("rollout.placement=disaggregated", "rollout.num_replicas=2"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_quickstart_passes_its_gate(tmp_path: Path, engine: str, place: str) -> None:
    needed(engine)
    run_quickstart(tmp_path, f"rollout.engine={engine}", *PLACES[place])


def test_the_quickstart_trains_in_one_environment_and_samples_in_another(tmp_path: Path) -> None:
    needed("torchtitan", "vllm")
    run_quickstart(
        tmp_path, "training.backend=torchtitan", "rollout.engine=vllm", *PLACES["disaggregated"]
    )


def run_quickstart(directory: Path, *overrides: str) -> None:
    """In a home of its own; prints a row of `docs/benchmarks.md`: medians of seconds by phase."""
    home = Home(directory / "run", "quickstart", DEADLINE_S)
    start = time.monotonic()
    accuracy = home.run(*overrides)["accuracy"]["final"]
    seconds = time.monotonic() - start
    phases = " ".join(f"{median(home.values(f'timing_s/{name}')):.2f}" for name in PHASES)
    worst = max(home.values("mismatch/logprob_abs_max"))
    print(
        f"\n| {' '.join(overrides)} | {accuracy:.1%} | {seconds:.0f} s | {phases} | {worst:.1e} |"
    )
    assert accuracy >= GATE
