"""THE loop: one round of RL, step by step.

Promises: everything random in a step is derived from (seed, round, step), so a round that was
killed continues from its newest valid step checkpoint and ends bitwise where an uninterrupted
one does; every step measures how far the sampler's logprobs are from the trainer's; a step
without a usable sample is skipped and counted, and too many of them in a row, over all rounds,
stop the run. A version is the number of the step, over all rounds, that made the weights: weights
that did not change keep theirs, across steps that are skipped, that warm up a critic or whose
updates were left out, and across a resume. A new round counts on from the steps of the rounds
before. With `optimizer.ema` a round samples from the weights themselves and commits their average.
What each line stands for is in its own module: prompts, experience, rl_metrics, and the
`ModelWorker` whose methods `run` calls on every rank.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engines.algorithms.distillation.objective import round_loss_fn
from engines.algorithms.reward_kl import next_coefficient
from engines.algorithms.reweighting import resample
from engines.algorithms.value_objective import ValueObjective
from engines.config.rules.components import resolved_algorithm
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.rollout import Rollout
from engines.controller.worker_group import WorkerGroup
from engines.errors import NothingToTrainOnError
from engines.trainers.experience import KL_IN_REWARD, Collector, Experience
from engines.trainers.guards.aborted import check_aborted
from engines.trainers.guards.mismatch import (
    MeasuredObjective,
    MismatchGate,
    check_versions,
    untrained_differences,
)
from engines.trainers.guards.poison import ROW, PoisonGuard
from engines.trainers.guards.probe import WeightProbe
from engines.trainers.kept_samples import SampleKeeper
from engines.trainers.phases import PhaseClock
from engines.trainers.progress import StageProgress
from engines.trainers.prompts import PromptSource, derive_seed
from engines.trainers.rl_metrics import Updates, step_metrics
from engines.trainers.scoring import CompletionScorer
from engines.trainers.step_columns import StepColumns
from engines.trainers.teacher import Teacher
from engines.trainers.trained_steps import TrainedSteps
from engines.training.roles import CRITIC, POLICY, RoleName
from engines.training.spec import LossFn
from engines.types import TokenBatch
from infra.faults import fault


class RLTrainer:
    """Trains a policy for one round.

    Args:
        config: the round.
        workers: ranks that hold the policy, with the round's first weights loaded.
        rollout: samples from the weights it was last given.
        prompts: what is sampled in each step.
        scorer: turns completions into scored samples.
        progress: journal, step checkpoints and job clock.
        probe_prompt: what every engine must continue as the trainer would, after each sync.
        vocab_size: of the policy.
        before: what the round before left; None for the first.
        attempt_dir: where samples are kept for people; None keeps none.
        teacher: as in `StepColumns`.
    """

    def __init__(
        self,
        config: RLRoundStageConfig,
        workers: WorkerGroup,
        rollout: Rollout,
        prompts: PromptSource,
        scorer: CompletionScorer,
        progress: StageProgress,
        probe_prompt: Sequence[int],
        vocab_size: int,
        before: TrainedSteps | None = None,
        attempt_dir: Path | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.workers, self.rollout = config.rl, workers, rollout
        self.algorithm = resolved_algorithm(config.rl)
        self.timeout_s = config.rollout.timeout_s
        self.prompts = prompts
        self.see = prompts.images.processor.of_sequences if prompts.images else None
        self.scorer, self.progress = scorer, progress
        self.loss_fn = MeasuredObjective(round_loss_fn(config.rl))
        self.guard = PoisonGuard(
            workers,
            config.rl.max_num_poisoned_updates,
            "rl.max_num_poisoned_updates",
            progress.say,
        )
        training_dtype = config.training.dtype
        rollout_dtype = config.rollout.dtype or training_dtype
        self.gate = MismatchGate.of(config.rl.mismatch, training_dtype, rollout_dtype)
        self.probe = WeightProbe(
            probe_prompt,
            config.rl.sampling.temperature,
            self.gate,
            partial(workers.run, ModelWorker.infer_logprobs),
        )
        self.previous_steps = config.rl.num_steps_before(config.round)
        self.version = self.previous_steps
        self.num_skipped = before.num_skipped if before else 0
        self.num_critic_steps = before.num_critic_steps if before else 0
        carried = before.kl_coef if before else None
        first = config.rl.algorithm.kl_ctrl.kl_coef
        self.kl_coef = first if carried is None else carried
        self.seed = prompts.seed
        self.columns = StepColumns(config.rl, workers.run, self.seed, vocab_size, teacher)
        self.keeper = SampleKeeper(config, workers.run, scorer.tokenizer, attempt_dir)

    def run(self) -> None:
        """Every step of the round that no step checkpoint holds yet."""
        state = self.progress.resume(self.workers)
        self.version = int(state.values.get("version", self.previous_steps + state.step))
        self.num_skipped = int(state.values.get("num_skipped", self.num_skipped))
        counted = self.num_critic_steps + state.step
        self.num_critic_steps = int(state.values.get("num_critic_steps", counted))
        self.kl_coef = float(state.values.get("kl_coef", self.kl_coef))
        self.guard.num_poisoned = int(state.values.get("num_poisoned", 0))
        with self.progress.clock("train"):
            self.rollout.publish(self.version, self.probe)
        for step in range(state.step + 1, self.config.num_steps_per_round + 1):
            self.step(step)
        self.progress.adopt_average(self.workers)

    def step(self, step: int) -> None:
        """One RL step: generate, score, filter, train, sync, record, checkpoint.

        Args:
            step: 1-based within the round.

        Raises:
            RolloutError: more samples than `max_aborted_frac` were unfinished at the deadline.
            RewardError: a sample lacks a component that the estimator compares.
            WeightSyncError: the sampler does not sample from the distribution that is trained.
            NothingToTrainOnError: one step more than `max_num_skipped_steps` in a row is skipped.
        """
        clock = PhaseClock()
        global_step = self.previous_steps + step
        collector = self._collect(global_step, clock)
        experience, updates, sync_bytes = collector.experience(), Updates(), 0
        if experience.num_groups:
            experience, updates = self._train(experience, clock, global_step)
            self.version = global_step if updates.policy else self.version
            with clock("update_weights"):
                # Engines that slept for an update that was not taken need their weights again.
                sync_bytes = self.rollout.publish(self.version, self.probe).sent.num_bytes
        self.num_skipped = 0 if experience.trains else self.num_skipped + 1
        untrained = {} if updates.policy else self._untrained(collector.scored().batch, clock)
        if not experience.num_groups:
            self.keeper.keep(collector.scored(), clock, global_step)

        metrics = step_metrics(collector, experience, updates, clock, self.workers.world_size)
        metrics |= self.workers.run(ModelWorker.performance_metrics) | untrained
        metrics |= {
            "training/global_step": float(global_step),
            "training/policy_version": float(self.version),
            "training/poisoned_updates": float(self.guard.num_poisoned),
            "rollout/sync_bytes": float(sync_bytes),
            "rollout/num_restarts": float(self.rollout.num_restarts),
            "training/epoch": self.prompts.epoch(global_step),
        }
        self.progress.record(global_step, step, metrics, clock)
        self._check_skipped(step)
        self.progress.checkpoint_when_due(
            step,
            self.workers,
            values={
                "version": self.version,
                "num_skipped": self.num_skipped,
                "num_poisoned": self.guard.num_poisoned,
                "num_critic_steps": self.num_critic_steps,
                "kl_coef": self.kl_coef,
            },
        )

    def _collect(self, global_step: int, clock: PhaseClock) -> Collector:
        """Generate and score until the step has the groups it trains on."""
        collector = Collector(
            self.config.batch_size_prompts, self.config.algorithm.filter_groups, self.see
        )
        for prompts in self.prompts.generation_batches(global_step):
            with self.scorer.begin(prompts) as scoring:
                with clock("gen"):
                    completions = self.rollout.generate(prompts.all_requests, scoring.accept)
                check_versions(completions, self.version)
                check_aborted(completions, self.config.max_aborted_frac, self.timeout_s)
                with clock("reward"):
                    scored = scoring.finish(completions)
            collector.add(scored)
            if collector.full:
                break
        return collector

    def _train(
        self, experience: Experience, clock: PhaseClock, global_step: int
    ) -> tuple[Experience, Updates]:
        """Every update of the step; returns what was trained on, with its columns."""
        config, updates = self.config, Updates()
        with clock("sleep"):
            self.rollout.sleep()
        experience = self.columns.fill(experience, clock, global_step)
        with clock("adv"):
            experience = experience.with_advantages(self.algorithm, self.kl_coef)
            experience = self._drawn_again(experience, global_step)
            if config.algorithm.use_kl_in_reward:
                kl, num_samples = experience.metrics[KL_IN_REWARD], len(experience.samples)
                control = config.algorithm.kl_ctrl
                self.kl_coef = next_coefficient(control, self.kl_coef, kl, num_samples)
        self.keeper.keep(experience, clock, global_step)
        if config.critic is not None:
            loss_fn = ValueObjective(config.critic.cliprange_value)
            num_epochs = config.critic.num_epochs or config.num_epochs
            with clock("update_critic"):
                self._update(CRITIC, experience, loss_fn, num_epochs, updates)
            fault("rl.critic_updated")
            # Its own steps: a critic may begin anew in any round.
            self.num_critic_steps += 1
            if self.num_critic_steps <= config.critic.num_warmup_steps:
                return experience, updates
        with clock("update_actor"):
            self._update(POLICY, experience, self.loss_fn, config.num_epochs, updates)
        self.gate.check([update.metrics for update in updates.policy])
        return experience, updates

    def _update(
        self,
        role: RoleName,
        experience: Experience,
        loss_fn: LossFn,
        num_epochs: int,
        updates: Updates,
    ) -> None:
        """Every mini-batch of every epoch for one role; those that were taken are noted."""
        numbers = torch.arange(len(experience.samples))
        numbered = experience.with_rows(**{ROW: numbers})
        for batch in numbered.mini_batches(self.config.prompts_per_update, num_epochs):
            found = self.workers.run(ModelWorker.train, batch, loss_fn, role)
            update = self.guard.taken(found, batch, experience.name_of, role)
            if update is not None:
                updates.of(role).append(update)

    def _untrained(self, scored: TokenBatch, clock: PhaseClock) -> dict[str, float]:
        """How far sampler and trainer are apart where no update of the policy says it."""
        if not scored.num_sequences:
            return {}
        with clock("old_log_prob"):
            logprobs_T = self.workers.run(ModelWorker.infer_logprobs, scored)
        found = untrained_differences(logprobs_T, scored)
        self.gate.check([found])
        return found

    def _drawn_again(self, experience: Experience, global_step: int) -> Experience:
        """With PF-PPO, the samples that the step trains on; each keeps its own advantage."""
        config = self.config.algorithm.pf_ppo
        if not config.enable:
            return experience
        seed = derive_seed(self.seed, f"step={global_step}/pf_ppo")
        chosen_B = resample(experience.rewards_B, experience.group_index_B, config, seed)
        return experience.take(chosen_B.tolist())

    def trained_steps(self) -> TrainedSteps:
        """What the next round has to know, when this one is done."""
        num_steps = self.previous_steps + self.config.num_steps_per_round
        kl_coef = self.kl_coef if self.config.algorithm.use_kl_in_reward else None
        return TrainedSteps(
            stage="rl_round",
            num_steps=num_steps,
            num_skipped=self.num_skipped,
            kl_coef=kl_coef,
            num_critic_steps=self.num_critic_steps,
        )

    def _check_skipped(self, step: int) -> None:
        limit = self.config.max_num_skipped_steps
        if self.num_skipped > limit:
            raise NothingToTrainOnError(
                f"step {step}: {self.num_skipped} steps in a row had nothing to train on, more "
                f"than rl.max_num_skipped_steps {limit}: all samples were aborted, unscored, in "
                "groups of equal scores or kept by no estimator; look at the rewards of the last "
                "steps, take prompts that the policy sometimes solves, or raise the limit"
            )
