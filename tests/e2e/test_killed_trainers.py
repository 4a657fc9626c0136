"""Every trainer, killed at a random step: it goes on bitwise, and on two ranks all but bitwise.

SFT and GRPO are killed in `test_jobs.py` too, twice each; here are all others.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_bench import Bench, digest_of, metrics_of
from safetensors.torch import load_file
from test_jobs import Processes
from tiny_stages import DATA, MODEL, RL_ROUND, SFT
from torch import Tensor

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig
from engines.config.stages.base import Runtime, StageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
from engines.data.read.dataset import load_dataset
from engines.training.backends.merging import policy_weights
from infra import env
from infra.host import servers
from infra.ray.cluster import ensure_cluster
from infra.store.artifacts import external_artifact
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import open_storage
from infra.tracking.journal import JournalRecord, read_journal
from tasks.runner.earlier_work import find_adoptable
from tasks.runner.run import STAGE_SCHEMA_VERSION, StageRequest
from tasks.runner.submission import Submission

NUM_STEPS = 12
CLOSE = 1e-5
"""Relative norm of all weights, on one rank and on two."""
PAIRS = {
    **DATA,
    "arithmetic": {**DATA["arithmetic"], "num_preference": 40, "num_preference_eval": 4},
}
OPTIMIZER = {"lr": 1e-3, "schedule": "cosine", "num_warmup_steps": 2}
PAIR_STAGE = {
    "model": MODEL,
    "training": {"num_threads": 1},
    "checkpoint": {"every_num_steps": 2},
}
ON_PAIRS = {"num_steps": NUM_STEPS, "batch_size_pairs": 8, "optimizer": OPTIMIZER}


def rl(**changes: Any) -> dict[str, Any]:
    """A round of so many steps."""
    return {**RL_ROUND, "rl": {**RL_ROUND["rl"], "num_steps_per_round": NUM_STEPS, **changes}}


def preference(loss: str, **options: float) -> dict[str, Any]:
    return {**PAIR_STAGE, "preference": {**ON_PAIRS, "loss": loss, "options": options}}


STAGES: dict[str, type[StageConfig]] = {
    "sft": SFTStageConfig,
    "reward_model": RewardModelStageConfig,
    "preference": PreferenceStageConfig,
    "rl_round": RLRoundStageConfig,
}
CRITIC = {"optimizer": {"lr": 1e-3}, "num_warmup_steps": 2}
TRAINERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {**SFT, "sft": {**SFT["sft"], "num_steps": NUM_STEPS}}),
    "reward_model": ("reward_model", {**PAIR_STAGE, "reward_model": ON_PAIRS}),
    "dpo": ("preference", preference("sigmoid", beta=0.1)),
    "kto": ("preference", preference("kto", beta=0.1)),
    "orpo": ("preference", preference("orpo")),
    "grpo": ("rl_round", rl()),
    "ppo": ("rl_round", rl(algorithm={"adv_estimator": "gae"}, critic=CRITIC)),
    "distillation": ("rl_round", rl(algorithm={}, distillation={"path": "TEACHER", "num_top": 4})),
    "served_distillation": (
        "rl_round",
        rl(algorithm={}, distillation={"path": "TEACHER", "num_top": 4, "served": {}}),
    ),
}
DISTILLATIONS = ("distillation", "served_distillation")


@dataclass(frozen=True)
class Trained:
    """Undisturbed runs, by trainer."""

    bench: Bench
    dataset: Artifact
    policy: Artifact
    teacher: Path

    def config(self, trainer: str) -> tuple[str, dict[str, Any]]:
        """A trainer's stage and configuration."""
        stage, config = TRAINERS[trainer]
        if trainer in DISTILLATIONS:
            teaching = {**config["rl"]["distillation"], "path": str(self.teacher)}
            config = {**config, "rl": {**config["rl"], "distillation": teaching}}
        return stage, config

    def inputs(self, trainer: str) -> dict[str, Artifact]:
        """What its stage is given."""
        stage, _ = TRAINERS[trainer]
        given = {"dataset": self.dataset}
        if stage != "sft":
            given["policy"] = self.policy
        if trainer in {"grpo", "ppo"}:
            given["reference"] = self.policy
        if trainer in DISTILLATIONS:
            given["teacher"] = external_artifact(self.teacher)
        return given

    def undisturbed(self, trainer: str) -> tuple[Any, CommitRecord]:
        """Specification and commit of a run that nobody kills; made once."""
        stage, config = self.config(trainer)
        spec = self.bench.spec(stage, config, self.inputs(trainer))
        record = open_storage(spec.store_uri).lookup(spec.fingerprint)
        return spec, record or self.bench.run(spec)

    def weights(self, record: CommitRecord) -> dict[str, Tensor]:
        """Of what a stage committed, by hub name."""
        directory = open_storage(str(self.bench.root / "store")).local_copy(record.artifact)
        if (directory / "checkpoint").exists():
            return dict(policy_weights(directory))
        return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trainers")
    bench = Bench(root)
    dataset = bench.run(bench.spec("preprocess", {"data": PAIRS, "model": MODEL}, {})).artifact
    policy = bench.run(bench.spec("sft", SFT, {"dataset": dataset})).artifact
    files = open_storage(str(root / "store")).local_copy(dataset)
    tokenizer = load_dataset(files).tokenizer_dir
    assert tokenizer is not None
    shape = ArchitectureConfig.model_validate(MODEL["architecture"])
    create_random_model(shape, tokenizer, MODEL["max_length"], 7, root / "teacher")
    return Trained(bench, dataset, policy, root / "teacher")


def told(records: list[JournalRecord]) -> list[tuple[int | None, dict[str, float]]]:
    """Steps with their metrics, without those that measure the machine."""
    measured = ("timing_s/", "perf/", "memory/")
    return [
        (
            record.step,
            {n: v for n, v in record.values.items() if not n.startswith(measured)},
        )
        for record in records
        if "training/global_step" in record.values
    ]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name not in {"sft", "grpo"}])
def test_a_killed_trainer_goes_on_bitwise(trainer: str, trained: Trained) -> None:
    undisturbed, expected = trained.undisturbed(trainer)
    spec = undisturbed.model_copy(update={"fingerprint": digest_of(f"{trainer} killed")})
    step = random.Random(time.time_ns()).randrange(1, NUM_STEPS)
    trained.bench.kill_after_step(spec, step)
    record = trained.bench.run(spec.model_copy(update={"attempt": 1}))
    assert record.artifact.digest == expected.artifact.digest, step
    assert told(metrics_of(spec)) == told(metrics_of(undisturbed))
    assert [at for at, _ in told(metrics_of(spec))] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_teacher_in_own_engines_matches_teacher_on_the_ranks(
    trained: Trained,
) -> None:
    (of_ranks, held), (of_engines, asked) = map(trained.undisturbed, DISTILLATIONS)
    assert relative_distance(trained.weights(asked), trained.weights(held)) <= CLOSE
    losses = [
        [values["distillation/loss"] for _, values in told(metrics_of(spec))]
        for spec in (of_ranks, of_engines)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where two ranks run."""
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in names}
    home = tmp_path_factory.mktemp("ray")
    patch = pytest.MonkeyPatch()
    # The head listens on loopback only; a process that is no job of it must say so.
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        env.set_for_process("RAY_ADDRESS", ensure_cluster(home, num_cpus=4).gcs_address)
        yield
    finally:
        servers.end(home, "ray")
        patch.undo()
        for name, value in before.items():
            env.set_for_process(name, value)


@pytest.mark.stacks
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_killed_trainer_goes_on_with_two_ranks(trainer: str, trained: Trained) -> None:
    """The same rows in the same order; of the weights the last digits may differ."""
    undisturbed, expected = trained.undisturbed(trainer)
    bench, store = trained.bench, open_storage(undisturbed.store_uri)
    half = undisturbed.model_copy(
        update={
            "fingerprint": digest_of(f"{trainer} half"),
            "schema_version": STAGE_SCHEMA_VERSION,
        }
    )
    bench.kill_after_step(half, NUM_STEPS // 2)
    stage, config = trained.config(trainer)
    training = {"num_threads": 1, "num_workers": 2}
    layout = STAGES[stage].model_validate({**config, "training": training})
    request = StageRequest(layout, trained.inputs(trainer), seed=3)
    work = find_adoptable(store, request)
    assert work is not None
    assert "training.num_workers 1 -> 2" in work.differs
    Submission(
        request=request, storage=store, runtime=Runtime(), metadata={}, follower="me",
        run_key="a" * 64, adopts=work,
    ).submit(Processes(bench), 0, "")  # type: ignore[arg-type]  # fmt: skip
    record = store.lookup(request.fingerprint)
    assert record is not None
    assert record.adopted is not None
    assert relative_distance(trained.weights(record), trained.weights(expected)) <= CLOSE
    ours, theirs = told(read_journal(store, request.fingerprint)[0]), told(metrics_of(undisturbed))
    assert [at for at, _ in ours] == list(range(1, NUM_STEPS + 1))
    names = {name for _, values in theirs for name in values}
    lengths = {name for name in names if name == "train/global_tokens" or "length/" in name}
    assert lengths, f"what tells rows apart is missing among {sorted(names)}"
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        assert {n: mine.get(n) for n in lengths} == {n: other.get(n) for n in lengths}


def relative_distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all weights, over the norm of theirs."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in theirs)
    return (apart / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5
