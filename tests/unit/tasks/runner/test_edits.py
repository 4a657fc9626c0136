"""Edit this file, and these stages run: a table over files of all floors, by real closures."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engines.config.training import HardwareConfig, TrainingConfig
from flows.plan import Planner
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra.store.storage import LocalStorage
from tasks.runner import run as identity
from tasks.runner.run import UNCOUNTED, StageRequest, StageResult, numeric_sources

ROOT = Path(__file__).resolve().parents[4]
RL = {"rl_round"}
TRAIN = {"sft", *RL}
MEASURE = {"evaluate"}
DEVICE = {*TRAIN, *MEASURE}
TORCH = {*DEVICE, "merge"}
"""The stages that name a training backend, too: a policy is evaluated where it was trained."""

NOTHING = (
    "flows/rlhf_pipeline.py",
    "flows/stage_order.py",
    "flows/plan.py",
    "flows/recipe/recipe.py",
    "flows/recipe/recipe.py",
    "flows/report/plots.py",
    "flows/run/pipeline_run.py",
    "flows/commands/cli.py",
    "tasks/runner/stage.py",
    "tasks/runner/following.py",
    "tasks/runner/run.py",
    "infra/redact.py",
    "infra/env.py",
    "infra/errors.py",
    "infra/faults.py",
    "infra/waiting.py",
    "infra/host/processes.py",
    "infra/ray/jobs.py",
    "infra/store/storage.py",
    "infra/store/heartbeat.py",
    "infra/store/artifacts.py",
    "infra/tracking/journal.py",
    "infra/services/stack.py",
    "engines/config/stages/base.py",
    "engines/config/recipe.py",
    "engines/config/backends.py",
    "engines/config/plugins.py",
    "engines/config/rules/algorithm.py",
    "engines/errors.py",
    "engines/jobs/process/runtime.py",
    "engines/trainers/step_timer.py",
    "hardware/detection.py",
    "hardware/survey.py",
)
STAGES = {
    "engines/algorithms/advantages/group_relative.py": RL,
    "engines/algorithms/losses.py": RL,
    "engines/algorithms/kl.py": RL,
    "engines/algorithms/policy_objective.py": RL,
    "engines/algorithms/supervised.py": {"sft"},
    "engines/trainers/rl.py": RL,
    "engines/trainers/supervised/trainer.py": {"sft"},
    "engines/jobs/sft.py": {"sft"},
    "engines/jobs/rl_round.py": RL,
    "engines/jobs/merge.py": {"merge"},
    "engines/jobs/evaluate.py": MEASURE,
    "engines/jobs/promote.py": {"promote"},
    "engines/trainers/evaluation/comparison.py": {"promote"},
    "engines/trainers/evaluation/documents.py": {"promote"},
    "infra/tracking/promotion.py": {"promote"},
    "infra/tracking/comparison.py": {"promote", "sft"},
    "engines/trainers/evaluation/evaluator.py": MEASURE,
    "engines/jobs/preprocess.py": {"preprocess"},
    "engines/data/prepare/preprocessors/gsm8k.py": set(),  # the quickstart names none
    "engines/data/prepare/arithmetic.py": {"preprocess"},
    "engines/data/prepare/tokenizer_training.py": {"preprocess"},
    "engines/training/backends/fsdp/engine.py": TORCH,
    "hardware/cpu.py": DEVICE,
    "hardware/nvidia.py": set(),  # the plan knows that it is not here
    "hardware/accelerator.py": set(),
    "hardware/cpu_megatron.py": set(),
    "hardware/cpu_torchtitan.py": set(),
    "engines/training/backends/megatron/engine.py": set(),
    # A round writes the weights that its critic starts on.
    "engines/checkpoint/export.py": {*RL, "merge", *MEASURE},
    "engines/rollout/transformers/engine.py": {*RL, *MEASURE},
    "engines/config/sections.py": DEVICE,
    "engines/types.py": TORCH,
    "hardware/base.py": TORCH,
}
MEGATRON = {
    "engines/training/backends/megatron/engine.py": TORCH,
    "hardware/cpu_megatron.py": DEVICE,
    "hardware/cpu_torchtitan.py": set(),
    "engines/training/backends/mindspeed/engine.py": TORCH,  # the same backend, on another device
    "engines/training/backends/fsdp/engine.py": set(),
    "engines/algorithms/advantages/group_relative.py": RL,
    "infra/redact.py": set(),
}


NVIDIA = {
    "hardware/nvidia.py": DEVICE,
    "hardware/accelerator.py": DEVICE,
    "hardware/cpu.py": set(),
    "hardware/amd.py": set(),
}


class Fingerprints:
    """Fingerprints of a pipeline's stages, each with stand-ins for its inputs.

    Args:
        recipe: of the pipeline.
        store: any empty place.
    """

    def __init__(self, recipe: Recipe, store: Path) -> None:
        self._planner = Planner(LocalStorage(store), recipe.seed, {})
        self.requests: list[StageRequest] = []
        self.seed = recipe.seed
        run_stages(recipe, self, lambda _: None)

    def run(self, request: StageRequest) -> StageResult:
        self.requests.append(request)
        return self._planner.run(request)

    def register_model(self, *arguments: object) -> None:
        raise AssertionError("nothing here is promoted")

    def now(self) -> dict[str, str]:
        """By label of a stage, as if asked for the first time."""
        return {request.label: replace(request).fingerprint for request in self.requests}

    def kinds(self, labels: set[str]) -> set[str]:
        """What kinds of stage some labels are."""
        return {request.config.stage for request in self.requests if request.label in labels}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fingerprints]:
    planned = ["rl.num_rounds=1", "hardware={platform: cpu, device_kind: x86_64}"]
    quickstart = load_recipe("quickstart", planned)
    nvidia = HardwareConfig(platform="nvidia", device_kind="NVIDIA H100")
    # No extra and no device is needed to name the sources.
    changes = {
        "fsdp2": {"training": TrainingConfig(backend="fsdp2")},
        "megatron": {"training": TrainingConfig(backend="megatron")},
        "fsdp2 on nvidia": {"hardware": nvidia},
    }
    return {
        name: Fingerprints(quickstart.model_copy(update=change), tmp_path_factory.mktemp("store"))
        for name, change in changes.items()
    }


@pytest.mark.parametrize(
    ("pipeline", "file", "stages"),
    [
        *(("fsdp2", file, set()) for file in NOTHING),
        *(("fsdp2", file, stages) for file, stages in STAGES.items()),
        *(("megatron", file, stages) for file, stages in MEGATRON.items()),
        *(("fsdp2 on nvidia", file, stages) for file, stages in NVIDIA.items()),
    ],
)
def test_an_edit_runs_the_stages_whose_numbers_it_can_change(
    pipeline: str,
    file: str,
    stages: set[str],
    pipelines: dict[str, Fingerprints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (ROOT / file).is_file()
    module = file.removesuffix(".py").replace("/", ".")
    before = pipelines[pipeline].now()

    def edited(roots: Sequence[str]) -> dict[str, str]:
        found = numeric_sources(roots)
        return {**found, module: "edited"} if module in found else found

    monkeypatch.setattr(identity, "numeric_sources", edited)
    after = pipelines[pipeline].now()
    changed = {label for label in before if before[label] != after[label]}
    assert pipelines[pipeline].kinds(changed) == stages


def test_every_module_that_does_not_count_exists() -> None:
    for module in UNCOUNTED:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), module


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """What this thread opens, of all files."""
    opened: list[str] = []
    here, is_over = threading.get_ident(), threading.Event()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and not is_over.is_set() and threading.get_ident() == here:
            opened.append(str(arguments[0]))

    sys.addaudithook(note)  # there is no way to take one out
    yield opened
    is_over.set()


def test_no_file_is_reread_for_later_stages_of_the_same_code(
    pipelines: dict[str, Fingerprints],
) -> None:
    request = next(r for r in pipelines["fsdp2"].requests if r.config.stage == "rl_round")
    rounds = [request.config.model_copy(update={"round": number}) for number in range(1, 101)]
    assert request.fingerprint  # of the first, which reads the files
    with counted_reads() as opened:
        found = {replace(request, config=config).fingerprint for config in rounds}
        assert (len(found), opened) == (len(rounds), [])
        Path(__file__).read_bytes()
    assert opened == [__file__]
