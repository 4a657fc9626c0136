"""Compute advantages: the estimator, the KL in the reward, and PF-PPO's resampling.

Promises: random draws depend only on the seed and the step.
"""

from engines.algorithms.reward_kl import next_coefficient
from engines.algorithms.reweighting import resample
from engines.config.rules.components import resolved_algorithm
from engines.config.sections import RLConfig
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.samples.prompts import derive_seed
from engines.trainers.step.experience import KL_IN_REWARD, Experience
from engines.trainers.step.loop_state import LoopState


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
