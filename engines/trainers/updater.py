"""Train on the samples of a step: first the critic, then the policy, mini-batch by mini-batch.

Promises: while the critic warms up, only it is trained; a non-finite update changes no weight and
is counted.

Compute advantages: the estimator, the KL in the reward, and PF-PPO's resampling.

Promises: random draws depend only on the seed and the step.
"""

import torch

from engines.algorithms.distillation import round_loss_fn
from engines.algorithms.policy_objective import resample
from engines.algorithms.reward_shaping import next_coefficient
from engines.algorithms.value_objective import ValueObjective
from engines.config.rules.models import resolved_algorithm
from engines.config.sections import RLConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.trainers.guards import ROW, MeasuredObjective, MismatchGate, PoisonGuard
from engines.trainers.loop_state import LoopState, Updates
from engines.trainers.progress import LoopStep
from engines.trainers.prompts import derive_seed
from engines.trainers.rollout_batch import KL_IN_REWARD, Experience
from engines.training.spec import CRITIC, POLICY, LossFn, RoleName
from engines.types import TrainMetrics
from infra.faults import fault


class Updater:
    """Trains the policy and, if there is one, the critic."""

    def __init__(
        self, config: RLConfig, workers: WorkerGroup, gate: MismatchGate, guard: PoisonGuard
    ) -> None:
        self._config, self._workers, self._gate, self._guard = config, workers, gate, guard
        self._loss_fn = MeasuredObjective(round_loss_fn(config))

    def train(self, step: LoopStep, experience: Experience, state: LoopState) -> Updates:
        """Run every update of the step; without samples none.

        Raises:
            NonFiniteError: more than `max_num_poisoned_updates` were left out.
            WeightSyncError: the sampler does not sample from the distribution that is trained.
        """
        if not experience.num_groups:
            return Updates()
        config, num_left_out = self._config, state.num_poisoned
        of_critic: list[TrainMetrics] = []
        if config.critic is not None:
            loss_fn = ValueObjective(config.critic.cliprange_value)
            num_epochs = config.critic.num_epochs or config.num_epochs
            with step.clock("update_critic"):
                of_critic, num_left_out = self._update(
                    CRITIC, experience, loss_fn, num_epochs, num_left_out
                )
            fault("rl.critic_updated")
        of_policy: list[TrainMetrics] = []
        # Count the critic's own steps: a new critic may start in any round.
        if config.critic is None or state.num_critic_steps >= config.critic.num_warmup_steps:
            with step.clock("update_actor"):
                of_policy, num_left_out = self._update(
                    POLICY, experience, self._loss_fn, config.num_epochs, num_left_out
                )
            self._gate.check([update.metrics for update in of_policy])
        return Updates(
            tuple(of_policy),
            tuple(of_critic),
            trained_critic=config.critic is not None,
            num_poisoned=num_left_out - state.num_poisoned,
        )

    def _update(
        self,
        role: RoleName,
        experience: Experience,
        loss_fn: LossFn,
        num_epochs: int,
        num_left_out: int,
    ) -> tuple[list[TrainMetrics], int]:
        """Train one role on all mini-batches; continue the count of left-out updates."""
        numbered = experience.with_rows(**{ROW: torch.arange(len(experience.samples))})
        taken: list[TrainMetrics] = []
        for batch in numbered.mini_batches(self._config.prompts_per_update, num_epochs):
            found = self._workers.run(ModelWorker.train, batch, loss_fn, role)
            update = self._guard.taken(
                found, batch, experience.name_of, role, num_before=num_left_out
            )
            if update is None:
                num_left_out += 1
            else:
                taken.append(update)
        return taken, num_left_out


class RoundObjective:
    """Computes advantages and adapts the KL coefficient."""

    def __init__(self, config: RLConfig, seed: int) -> None:
        self._algorithm, self._seed = resolved_algorithm(config), seed

    @property
    def has_kl_in_reward(self) -> bool:
        """True if the reward has a KL penalty, whose coefficient carries over from step to step."""
        return self._algorithm.use_kl_in_reward

    def advantages(self, step: LoopStep, experience: Experience, state: LoopState) -> Experience:
        """Return the samples to train on, with `advantages` and, for a critic, `returns`.

        PF-PPO repeats and drops samples; each keeps its own advantage. Raises `RewardError` if a
        sample lacks a component that the estimator compares.
        """
        if not experience.num_groups:
            return experience
        with step.clock("adv"):
            experience = experience.with_advantages(self._algorithm, state.kl_coef)
            config = self._algorithm.pf_ppo
            if not config.enable:
                return experience
            seed = derive_seed(self._seed, f"step={step.global_number}/pf_ppo")
            rewards_B, group_index_B = experience.rewards_B, experience.group_index_B
            chosen_B = resample(rewards_B, group_index_B, config, seed)
            return experience.take(chosen_B.tolist())

    def next_kl_coef(self, experience: Experience, state: LoopState) -> float:
        """Return the KL coefficient of the next step; unchanged if fixed or without samples."""
        if not self.has_kl_in_reward or not experience.num_groups:
            return state.kl_coef
        kl, num_samples = experience.metrics[KL_IN_REWARD], len(experience.samples)
        return next_coefficient(self._algorithm.kl_ctrl, state.kl_coef, kl, num_samples)
