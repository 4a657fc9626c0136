"""State of the RL loop between two steps, what a checkpoint keeps of it, and a step's updates.

Promises: a loop resumed from a step checkpoint has the state of the uninterrupted one; a value that
a checkpoint of an older version lacks is estimated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.checkpoint.step_store import TrainerState
from engines.config.sections import RLConfig
from engines.trainers.trained_steps import TrainedSteps
from engines.types import TrainMetrics


@dataclass(frozen=True)
class Updates:
    """The optimizer steps of one RL step.

    Attributes:
        policy: applied updates in order; none while the critic warms up.
        trained_critic: True if the step trained the critic.
        num_poisoned: updates of either role that were left out since they were not finite.
    """

    policy: tuple[TrainMetrics, ...] = ()
    critic: tuple[TrainMetrics, ...] = ()
    trained_critic: bool = False
    num_poisoned: int = 0


def update_metrics(prefix: str, updates: Sequence[TrainMetrics]) -> dict[str, float]:
    """Return the mean of a role's metrics over its updates; the maximum if named `*_max`."""
    if not updates:
        return {}
    merged: dict[str, list[float]] = {}
    for update in updates:
        own = {f"{prefix}/loss": update.loss, f"{prefix}/grad_norm": update.grad_norm}
        for name, value in {**own, **update.metrics}.items():
            merged.setdefault(name, []).append(value)
    return {
        **{
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in merged.items()
        },
        f"{prefix}/lr": updates[-1].lr,
        f"{prefix}/num_updates": float(len(updates)),
    }


@dataclass(frozen=True)
class LoopState:
    """State of the RL loop after a step.

    Attributes:
        step: last finished step within the round; 0 before the first.
        version: global step that produced the policy's weights.
        num_skipped: trailing steps in a row, over all rounds, that trained on nothing.
        num_poisoned: updates of the round that were left out since they were not finite.
        num_critic_steps: steps that trained the current critic.
        kl_coef: coefficient of the KL term in the reward of the next step.
    """

    num_previous_steps: int
    step: int
    version: int
    num_skipped: int
    num_poisoned: int
    num_critic_steps: int
    kl_coef: float

    @staticmethod
    def at_start(config: RLConfig, number: int, before: TrainedSteps | None) -> "LoopState":
        """Return the state before a round (`number` is 1-based); counts continue from `before`."""
        num_previous_steps = config.num_steps_before(number)
        carried = before.kl_coef if before else None
        return LoopState(
            num_previous_steps=num_previous_steps,
            step=0,
            version=num_previous_steps,
            num_skipped=before.num_skipped if before else 0,
            num_poisoned=0,
            num_critic_steps=before.num_critic_steps if before else 0,
            kl_coef=config.algorithm.kl_ctrl.kl_coef if carried is None else carried,
        )

    @property
    def global_step(self) -> int:
        """Last finished step, over all rounds."""
        return self.num_previous_steps + self.step

    @property
    def values(self) -> Mapping[str, int | float]:
        """Values of a step checkpoint besides the step."""
        return {
            "version": self.version,
            "num_skipped": self.num_skipped,
            "num_poisoned": self.num_poisoned,
            "num_critic_steps": self.num_critic_steps,
            "kl_coef": self.kl_coef,
        }

    def continued(self, saved: TrainerState) -> "LoopState":
        """Return the state of the checkpoint `saved`; `self` if its step is 0: no checkpoint."""
        get, step = saved.values.get, saved.step
        return replace(
            self,
            step=step,
            version=int(get("version", self.num_previous_steps + step)),
            num_skipped=int(get("num_skipped", self.num_skipped)),
            num_poisoned=int(get("num_poisoned", 0)),
            num_critic_steps=int(get("num_critic_steps", self.num_critic_steps + step)),
            kl_coef=float(get("kl_coef", self.kl_coef)),
        )

    def after(self, updates: Updates, *, trains: bool, kl_coef: float) -> "LoopState":
        """Return the state after the next step; `trains` is True if it had a sample to train on."""
        return replace(
            self,
            step=self.step + 1,
            version=self.global_step + 1 if updates.policy else self.version,
            num_skipped=0 if trains else self.num_skipped + 1,
            num_poisoned=self.num_poisoned + updates.num_poisoned,
            num_critic_steps=self.num_critic_steps + updates.trained_critic,
            kl_coef=kl_coef,
        )

    def trained_steps(self, *, with_kl_coef: bool) -> TrainedSteps:
        """Return the content of `trainer.json`, from which the next round continues."""
        return TrainedSteps(
            stage="rl_round",
            num_steps=self.global_step,
            num_skipped=self.num_skipped,
            kl_coef=self.kl_coef if with_kl_coef else None,
            num_critic_steps=self.num_critic_steps,
        )
