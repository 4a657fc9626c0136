"""A whole RL round in this process: tiny model, real rollouts, rewards, journal, checkpoints."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

import engines
from engines.checkpoint.model_directory import create_random_model
from engines.checkpoint.step_store import StepCheckpoints
from engines.config.algorithm import RewardConfig
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.launch import launch_policy_beside, policy_replica
from engines.controller.model_worker import WorkerSpec
from engines.controller.rollout import FrozenModel, replica_beside
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import rl_prompts
from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer, text_config
from engines.jobs.rl_round import asked_teacher
from engines.rewards.scorer import RewardScorer
from engines.rollout.transformers import sampling
from engines.trainers.mismatch import probe_prompt
from engines.trainers.progress import StageProgress
from engines.trainers.prompts import PromptSource
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import CompletionScorer
from engines.trainers.step_timer import PhaseClock
from engines.trainers.trained_steps import TrainedSteps
from engines.training.spec import (
    CRITIC,
    POLICY,
    REFERENCE,
    TEACHER,
    ModelSource,
    RoleName,
    RoleSpec,
)
from engines.vision.processor import PromptImages, prompt_images
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal, read_records

REWARD_CODE = """
def odd_length(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)

def always(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def two_components(data_source, solution_str, ground_truth, extra_info=None):
    odd, digits = len(solution_str) % 2, sum(c.isdigit() for c in solution_str)
    return {"score": float(odd), "acc": float(odd), "digits": digits, "note": "no number"}

def often_broken(data_source, solution_str, ground_truth, extra_info=None):
    return None if "0" in solution_str else float(len(solution_str) % 2)
"""

SUMS = tuple(
    RLRow("s", (Message("user", f"{i}+{i}="),), "", RewardModel("rule", str(2 * i)))
    for i in range(8)
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny-rl")
    tokenizer_dir = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=32, chat_template=None
    )
    shape = ArchitectureConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32
    )
    create_random_model(shape, tokenizer_dir, 32, 1, root / "model")
    return root / "model"


@pytest.fixture
def stacks() -> Iterator[list[list[str]]]:
    """The engines' files on the stack of each optimizer step, innermost first."""
    seen: list[list[str]] = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(_files_on_the_stack()))
    yield seen
    handle.remove()


@pytest.fixture
def sampling_stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The engines' files on the stack of each draw of tokens, innermost first."""
    seen: list[list[str]] = []
    draw = sampling._sample_chunk

    def spy(*arguments: Any) -> Any:
        main = sys._current_frames()[threading.main_thread().ident]
        both = _files_on_the_stack() + _files_on_the_stack(main)
        seen.append(list(dict.fromkeys(both)))
        return draw(*arguments)

    monkeypatch.setattr(sampling, "_sample_chunk", spy)
    return seen


def _files_on_the_stack(of: FrameType | None = None) -> list[str]:
    root = Path(engines.__file__).parents[1]
    files = [Path(frame.filename) for frame in reversed(traceback.extract_stack(of))]
    own = [str(file.relative_to(root)) for file in files if file.is_relative_to(root)]
    return list(dict.fromkeys(name for name in own if name.startswith("engines/")))


@pytest.fixture
def run_round(tiny_model: Path, tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Run a round in the process, in a directory of its own; returns the metrics of its steps."""
    reward_file = tmp_path / "rewards.py"
    reward_file.write_text(REWARD_CODE, encoding="utf-8")

    def run(
        reward: str,
        *,
        max_unscored_frac: float = 1.0,
        num_skipped: int = 0,
        kl_coef: float | None = None,
        number: int = 1,
        every: int = 100,
        num_critic_steps: int = 0,
        training: Mapping[str, Any] = MappingProxyType({}),
        work: str = ".",
        prompts: tuple[Path, Path] | None = None,
        see: Callable[[PromptImages], None] = lambda images: None,
        **changes: Any,
    ) -> list[dict[str, float]]:
        config = RLRoundStageConfig.model_validate(
            {
                "round": number,
                "model": {"init": "random", "max_length": 32},
                "training": {"num_threads": 1, **training},
                "rollout": {},
                "rl": {
                    "num_steps_per_round": 2,
                    "batch_size_prompts": 4,
                    "group_size": 4,
                    "sampling": {"max_new_tokens": 5},
                    "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
                    "reward": {
                        "function": f"{reward_file}:{reward}",
                        "max_unscored_frac": max_unscored_frac,
                    },
                    "max_num_skipped_steps": 2,
                    **changes,
                },
                "checkpoint": {"every_num_steps": every},
            }
        )
        before = TrainedSteps(
            stage="rl_round",
            num_steps=config.num_previous_steps,
            num_skipped=num_skipped,
            kl_coef=kl_coef,
            num_critic_steps=num_critic_steps,
        )
        directory = tmp_path / work
        directory.mkdir(exist_ok=True)
        if prompts is None:
            return _run(config, tiny_model, directory, before)
        model, dataset = prompts
        images = prompt_images(model, dataset / "images.parquet")
        assert images is not None
        see(images)
        with closing(MappedRows(load_dataset(dataset).rl_rows(), directory)) as rows:
            return _run(config, model, directory, before, rows, images)

    return run


def _roles(config: RLRoundStageConfig, model: Path) -> dict[RoleName, RoleSpec]:
    source, num_steps = ModelSource(model), config.rl.num_steps_per_round
    training, critic = config.training, config.rl.critic
    roles: dict[RoleName, RoleSpec] = {
        POLICY: RoleSpec(source, training, config.rl.optimizer, total_num_steps=num_steps)
    }
    if config.rl.algorithm.needs_reference:
        roles[REFERENCE] = RoleSpec(source, training)
    if config.rl.distillation and config.rl.distillation.served is None:
        roles[TEACHER] = RoleSpec(ModelSource(Path(str(config.rl.distillation.path))), training)
    if critic:
        without_adapter = training.model_copy(update={"lora": None})
        roles[CRITIC] = RoleSpec(source, without_adapter, critic.optimizer, "value_model")
    return roles


def _served_teachers(
    config: RLRoundStageConfig, spec: WorkerSpec, work: Path
) -> dict[str, FrozenModel]:
    """By name: none, or the one in engines of its own."""
    distillation = config.rl.distillation
    if distillation is None or distillation.served is None:
        return {}
    directory = Path(str(distillation.path))
    like = policy_replica(spec, config.rollout, work)
    options = distillation.served.options
    return {
        TEACHER: FrozenModel(replica_beside(like, directory, 1, options, embedded=True), directory)
    }


def _run(
    config: RLRoundStageConfig,
    model: Path,
    work: Path,
    before: TrainedSteps,
    rows: Sequence[RLRow] = SUMS,
    images: PromptImages | None = None,
) -> list[dict[str, float]]:
    tokenizer = DirectoryTokenizer.load(model)
    prompts = rl_prompts(rows, tokenizer, expanded=images.expanded if images else None)
    with ExitStack() as stack:
        rewards = stack.enter_context(
            RewardScorer(RewardConfig.model_validate(config.rl.reward.model_dump()))
        )
        spec = WorkerSpec(
            roles=_roles(config, model),
            serving_dir=model,
            rollout=config.rollout,
            temperature=config.rl.sampling.temperature,
            platform="cpu",
            seed=0,
        )
        vocab_size = text_config(model)["vocab_size"]
        teachers = _served_teachers(config, spec, work)
        replicas = {name: teacher.replica for name, teacher in teachers.items()}
        workers, rollout, beside = launch_policy_beside(spec, replicas, work)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(rollout))
        teacher = None
        for name, served in teachers.items():
            scope = asked_teacher(config.rl, served, beside[name], vocab_size)
            teacher = stack.enter_context(scope)
        journal = stack.enter_context(closing(Journal(work / "journal.jsonl")))
        progress = StageProgress(
            journal,
            Heartbeat(work / "heartbeat.json", 60.0),
            StepCheckpoints(work / "checkpoints", 2),
            config.checkpoint.every_num_steps,
            config.rl.num_steps_per_round,
            PhaseClock(),
        )
        scorer = CompletionScorer(
            rewards, tokenizer, config.rl.algorithm.overlong, config.rl.sampling.max_new_tokens
        )
        source = PromptSource(prompts, config, 0, images)
        prompt = probe_prompt(model, config.model.max_length)
        parts = (workers, rollout, source, scorer, progress)
        trainer = RLTrainer(config, *parts, prompt, vocab_size, before, work, teacher)
        trainer.train_round()
    records, _ = read_records(work / "journal.jsonl", 0)
    return [dict(record.values) for record in records if record.kind == "metrics"]
