"""The quickstart on every engine of an environment of its own, in every place."""

import time
from pathlib import Path
from statistics import median

import pytest
from namespaces import PIPELINES, environment_of_nodes, printed_by
from test_environments import needed
from tiny_pipeline import Home, settings

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


def test_quickstart_trains_and_samples_in_separate_environments(tmp_path: Path) -> None:
    needed("torchtitan", "vllm")
    run_quickstart(
        tmp_path, "training.backend=torchtitan", "rollout.engine=vllm", *PLACES["disaggregated"]
    )


def test_the_quickstart_passes_its_gate_on_three_nodes(tmp_path: Path) -> None:
    """Two ranks and vLLM have a node each."""
    needed("vllm")
    environment = environment_of_nodes()
    words = ("quickstart", *settings("rollout.engine=vllm"))
    found = printed_by(PIPELINES, tmp_path, environment, DEADLINE_S, *words)["quickstart"]
    assert found["code"] == 0, found["printed"]
    accuracy, worst = (
        found["accuracy"]["final"],
        max(values["mismatch/logprob_abs_max"] for values in found["values"]),
    )
    print(f"\n| three nodes | {accuracy:.1%} | {found['seconds']:.0f} s | {worst:.1e} |")
    assert accuracy >= GATE


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
