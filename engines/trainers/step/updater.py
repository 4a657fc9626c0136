"""Train on the samples of a step: first the critic, then the policy, mini-batch by mini-batch.

Promises: while the critic warms up, only it is trained; a non-finite update changes no weight and
is counted.
"""

import torch

from engines.algorithms.distillation.objective import round_loss_fn
from engines.algorithms.value_objective import ValueObjective
from engines.config.sections import RLConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.trainers.guards.mismatch import MeasuredObjective, MismatchGate
from engines.trainers.guards.poison import ROW, PoisonGuard
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.step.experience import Experience
from engines.trainers.step.loop_state import LoopState
from engines.trainers.step.updates import Updates
from engines.training.roles import CRITIC, POLICY, RoleName
from engines.training.spec import LossFn
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
