"""The real wiring of the pipeline over a real store; a file stands for what a job would compute."""

from pathlib import Path

from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from tasks.runner.run import StageRequest, StageResult

KINDS = {
    "preprocess": "dataset",
    "sft": "policy",
    "rl_round": "policy",
    "merge": "model",
    "evaluate": "evaluation",
    "promote": "promotion",
}


class CommittingRunner:
    """Publishes a file that stands for what the job would compute, and commits it."""

    seed = 0

    def __init__(
        self, storage: LocalStorage, scratch: Path, constant: tuple[str, ...] = ()
    ) -> None:
        self._storage = storage
        self._scratch = scratch
        self._constant = constant
        self.ran: list[str] = []
        self.requests: dict[str, StageRequest] = {}

    def run(self, request: StageRequest) -> StageResult:
        self.requests[request.label] = request
        record = self._storage.lookup(request.fingerprint)
        reused = record is not None
        if record is None:
            self.ran.append(request.label)
            record = self._commit(request)
        return StageResult(
            label=request.label,
            fingerprint=request.fingerprint,
            artifact=record.artifact,
            reused=reused,
            wall_s=0.0,
            metrics={},
            job_seconds={},
        )

    def _commit(self, request: StageRequest) -> CommitRecord:
        directory = self._scratch / request.fingerprint
        directory.mkdir(parents=True)
        content = "same" if request.label in self._constant else request.fingerprint
        (directory / "content").write_text(f"{request.label} {content}")
        artifact = self._storage.publish(directory, KINDS[request.config.stage])
        holder = Holder(id="test", process="test")
        return self._storage.commit(
            self._storage.attempts.hold(request.fingerprint, holder, 0),
            CommitRecord(
                fingerprint=request.fingerprint,
                stage=request.config.stage,
                artifact=artifact,
                attempt=0,
                committed_at="2026-01-01T00:00:00+00:00",
            ),
        )


def run(
    recipe: Recipe,
    storage: LocalStorage,
    scratch: Path,
    constant: tuple[str, ...] = (),
    incumbent: Artifact | None = None,
) -> CommittingRunner:
    runner = CommittingRunner(storage, scratch / "scratch", constant)
    runner.seed = recipe.seed
    run_stages(recipe, runner, lambda _: incumbent)
    return runner


def two_rounds(*overrides: str) -> Recipe:
    return load_recipe("quickstart", ["rl.num_rounds=2", HARDWARE, *overrides])


HARDWARE = "hardware={platform: cpu, device_kind: x86_64}"
"""What a plan makes of `auto`."""
MEASURING = ["evaluate_sft", "evaluate_rl_round_1", "evaluate_rl_round_2", "evaluate"]
ALL = [
    "preprocess",
    "sft",
    "evaluate_sft",
    "rl_round_1",
    "evaluate_rl_round_1",
    "rl_round_2",
    "evaluate_rl_round_2",
    "merge",
    "evaluate",
    "promote",
]
