"""What the RL loop knows between two steps: its only state, and what a step checkpoint keeps of it.

Promises: a loop that continues from a checkpoint has the state that the uninterrupted one had
there, also from one that lacks a value which its writer did not know. A version is the number of
the step, over all rounds, that made the weights: weights that did not change keep theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engines.checkpoint.step_store import TrainerState
from engines.config.sections import RLConfig
from engines.trainers.loop.trained_steps import TrainedSteps
from engines.trainers.step.updates import Updates


@dataclass(frozen=True)
class LoopState:
    """The loop after a step.

    Attributes:
        num_previous_steps: of the rounds before.
        step: that was done last, within the round; 0 before the first.
        version: of the policy's weights.
        num_skipped: the last steps in a row, over all rounds, that trained on nothing.
        num_poisoned: updates of the round that were left out.
        num_critic_steps: steps that trained the critic, since that began.
        kl_coef: of the KL in the reward, for the next step.
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
        """Before the first step of a round.

        Args:
            config: of the round.
            number: of the round, 1-based.
            before: what the round before left; None for the first.

        Returns:
            It continues the counts of the rounds before.
        """
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
        """That was done last, over all rounds."""
        return self.num_previous_steps + self.step

    @property
    def values(self) -> Mapping[str, int | float]:
        """What a step checkpoint keeps beside the number of the step."""
        return {
            "version": self.version,
            "num_skipped": self.num_skipped,
            "num_poisoned": self.num_poisoned,
            "num_critic_steps": self.num_critic_steps,
            "kl_coef": self.kl_coef,
        }

    def continued(self, saved: TrainerState) -> "LoopState":
        """The state that a checkpoint holds; of one before the first step, this one."""
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
        """The state after the next step.

        Args:
            updates: of the step.
            trains: whether the step had a sample to train on.
            kl_coef: for the step after it.

        Returns:
            One step further.
        """
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
        """What the next round has to know, when this one is done."""
        return TrainedSteps(
            stage="rl_round",
            num_steps=self.global_step,
            num_skipped=self.num_skipped,
            kl_coef=self.kl_coef if with_kl_coef else None,
            num_critic_steps=self.num_critic_steps,
        )
