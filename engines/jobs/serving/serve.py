"""Engines of a stage without training, with everything that scores their answers."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from engines.config.stages.serving import ServingStageConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import WorkerSpec
from engines.jobs.policy.stage import policy_tokenizer, queueing
from engines.jobs.process.runtime import JobContext
from engines.jobs.serving.judges import asked_judges, judge_source, reward_role
from engines.jobs.serving.model import ServedModel, ServedOnDemand, replica_of
from engines.judges.asking import NO_JUDGES
from engines.rewards.scorer import RewardScorer
from engines.trainers.scoring import CompletionScorer
from engines.training.spec import REWARD, RoleSpec
from engines.types import Completion, RolloutRequest

Config = TypeVar("Config", bound=ServingStageConfig)


@dataclass(frozen=True)
class Serving:
    """Engines that answer and the scorer of their answers."""

    engines: ServedOnDemand
    scorer: CompletionScorer

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Return completions as `ServedOnDemand.generate`."""
        return self.engines.generate(requests)


def serve(
    context: JobContext[Config], stack: ExitStack, served: ServedModel, rewards: RewardScorer
) -> Serving:
    """Return engines for a model, started on demand, and the scorer; judges start at once.

    `rewards` must have been started before torch was set up. `stack` closes everything.
    """
    config, seed = context.config, context.spec.seed
    replica = replica_of(config, served, context.attempt_dir)
    # The reward model is on one rank, whatever layout trained the policy.
    alone = TrainingConfig(num_threads=config.num_threads, dtype=config.dtype)
    role = reward_role(context, config.reward.model, alone)
    judge = judge_source(context, config.reward.judge, replica, embedded=config.driver_computes)
    engines = ServedOnDemand(
        served,
        lambda: launch_served_model(
            replica,
            None if role is None else _reward_worker(config, role, seed),
            judge.replica if judge else None,
            queueing(context, config.hardware),
        ),
        stack,
    )
    judges = NO_JUDGES
    if role or judge:
        launched = engines.launched
        judges = stack.enter_context(
            asked_judges(config.reward, seed, role, launched.beside, judge, launched.judge)
        )
    scorer = CompletionScorer(rewards, policy_tokenizer(served.hf_dir), judges=judges)
    return Serving(engines, scorer)


def _reward_worker(config: ServingStageConfig, role: RoleSpec, seed: int) -> WorkerSpec:
    return WorkerSpec(
        roles={REWARD: role},
        serving_dir=role.source.hf_dir,
        rollout=None,
        temperature=1.0,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=seed,
    )
