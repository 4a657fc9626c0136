"""The RL loop: one round of sampling and training, step by step.

`RLTrainer._train_step` is one step from top to bottom, like `RayPPOTrainer.fit` in verl; the
methods below it are its phases in their order.

Promises: everything random in a step is derived from (seed, round, step), so a killed round resumes
from its newest valid step checkpoint with bitwise the same result. Samples of other weights than
the published ones, or of a step with too many unfinished samples, are not trained on. A step with a
scored sample measures how sampler and trainer differ. A step without a usable sample trains nothing
and is counted; so is an update that is not finite, which changes no weight. With `optimizer.ema` a
round samples from the weights themselves and commits their average.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.kl import next_coefficient
from engines.algorithms.parts import find_part
from engines.algorithms.policy_objective import ValueObjective, resample, round_loss_fn
from engines.config.rows import ADVANTAGES, POLICY_LOSSES
from engines.config.rules.models import compared_components, resolved_algorithm
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.rollout import Rollout
from engines.controller.worker_group import WorkerGroup
from engines.errors import NothingToTrainOnError
from engines.trainers.experience import KL_IN_REWARD, Collector, Experience, check_aborted
from engines.trainers.loop_state import LoopState, Updates
from engines.trainers.mismatch import (
    MeasuredObjective,
    MismatchGate,
    WeightProbe,
    check_versions,
    untrained_differences,
)
from engines.trainers.nonfinite_guard import NUM_POISONED, ROW, PoisonGuard
from engines.trainers.progress import LoopStep, StageProgress
from engines.trainers.prompts import PromptSource, derive_seed
from engines.trainers.recorder import SampleKeeper, step_metrics
from engines.trainers.scoring import CompletionScorer
from engines.trainers.teacher import RankTeacher, Teacher
from engines.trainers.trained_steps import TrainedSteps
from engines.training.spec import CRITIC, POLICY, REFERENCE, LossFn, RoleName
from engines.types import Readouts, TrainMetrics
from infra.faults import fault


@dataclass
class RLTrainer:
    """Trains for one round.

    Attributes:
        workers: ranks that hold the policy, with the round's first weights loaded.
        probe_prompt: token ids for the check of each engine against the trainer after a sync.
        before: counters of the policy that the round starts from; None without one.
        attempt_dir: directory of the kept samples; None keeps none.
        teacher: None uses the ranks' role `teacher`, if distillation is configured.
    """

    config: RLRoundStageConfig
    workers: WorkerGroup
    rollout: Rollout
    prompts: PromptSource
    scorer: CompletionScorer
    progress: StageProgress
    probe_prompt: Sequence[int]
    vocab_size: int
    before: TrainedSteps | None = None
    attempt_dir: Path | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        rl, run, rollout = self.config.rl, self.workers.run, self.config.rollout
        training_dtype = self.config.training.compute_dtype
        self.start = LoopState.at_start(rl, self.config.round, self.before)
        self._algorithm = resolved_algorithm(rl)
        estimator = find_part(ADVANTAGES, self._algorithm.adv_estimator)
        self._options = estimator.options(self._algorithm)
        self._compared = compared_components(self._algorithm)
        self._prompts_per_update = rl.prompts_per_update
        self._loss_fn = MeasuredObjective(round_loss_fn(rl))
        self._gate = MismatchGate.of(
            rl.mismatch, training_dtype, rollout.quantization or rollout.dtype or training_dtype
        )
        self._probe = WeightProbe(
            self.probe_prompt,
            rl.sampling.temperature,
            self._gate,
            partial(run, ModelWorker.infer_logprobs),
        )
        self._guard = PoisonGuard(
            self.workers,
            rl.max_num_poisoned_updates,
            "rl.max_num_poisoned_updates",
            self.progress.journal.log,
        )
        self._keeper = SampleKeeper(self.config, run, self.scorer.tokenizer, self.attempt_dir)
        if self.teacher is None and rl.distillation is not None:
            self.teacher = RankTeacher(rl.distillation, run, self.vocab_size)
        self._columns = {
            *estimator.row.columns,
            *POLICY_LOSSES.find(rl.algorithm.loss_mode).columns,
            *({"ref_logprobs"} if rl.algorithm.needs_reference else ()),
            *({"old_logprobs"} if rl.algorithm.use_kl_in_reward else ()),
            *({"positive"} if rl.algorithm.positive_nll_coef else ()),
        }
        self._is_serving = False

    def train_round(self) -> TrainedSteps:
        """Train for one round and return the content of `trainer.json`.

        Raises:
            PipelineError: a guard stops the round.
        """
        state = self.start.continued(self.progress.resume(self.workers))
        with self.progress.clock("train"):
            self._publish(state.version)
        for number in range(state.step + 1, self.config.rl.num_steps_per_round + 1):
            state = self._train_step(LoopStep(number, state.num_previous_steps + number), state)
        self.progress.adopt_average(self.workers)
        return state.trained_steps(with_kl_coef=self._algorithm.use_kl_in_reward)

    def _train_step(self, step: LoopStep, state: LoopState) -> LoopState:
        """Train one step; a function of its own, so that its tensors are freed before the next."""
        collected = self.generate(step, state.version)
        experience, updates, kl_coef = collected.experience(), Updates(), state.kl_coef
        if experience.num_groups:
            experience = self.infer(step, experience)
            experience = self.estimate_advantages(step, experience, kl_coef)
            self._keeper.keep(step, experience)
            updates = self.update(step, experience, state)
            if self._algorithm.use_kl_in_reward:
                kl, control = experience.metrics[KL_IN_REWARD], self._algorithm.kl_ctrl
                kl_coef = next_coefficient(control, kl_coef, kl, len(experience.samples))
        else:
            self._keeper.keep(step, collected.scored())
        state = state.after(updates, trains=experience.trains, kl_coef=kl_coef)
        num_sync_bytes = self._publish(state.version, step)
        self._record(step, collected, experience, updates, state, num_sync_bytes)
        self.progress.checkpoint_when_due(state.step, self.workers, values=state.values)
        return state

    def generate(self, step: LoopStep, version: int) -> Collector:
        """Generate and score until the step has enough groups or no further batch.

        If a group was kept, the engines free their memory until the next publish.

        Raises:
            RolloutError: other weights sampled, or too many samples timed out.
            RewardError: the reward function is broken, or left too many samples unscored.
        """
        rl, images = self.config.rl, self.prompts.images
        collected = Collector(
            rl.batch_size_prompts,
            rl.algorithm.filter_groups,
            images.processor.of_sequences if images else None,
            self.workers.place,
        )
        for prompts in self.prompts.generation_batches(step.global_number):
            with self.scorer.begin(prompts.asked_rows, prompts.all_requests) as scoring:
                with step.clock("gen"):
                    completions = self.rollout.generate(prompts.all_requests, scoring.accept)
                check_versions(completions, version)
                check_aborted(completions, rl.max_aborted_frac, self.config.rollout.timeout_s)
                with step.clock("reward"):
                    scored = self.scorer.samples(prompts, completions, scoring.scores(completions))
            collected.add(scored)
            if collected.full:
                break
        if collected.num_groups:
            with step.clock("sleep"):
                self.rollout.sleep()
            self._is_serving = False
        return collected

    def infer(self, step: LoopStep, experience: Experience) -> Experience:
        """Add the columns that the algorithm reads and the samples do not have yet.

        `old_logprobs` is added if the algorithm reads it, or the step has several updates.
        """
        rl, tokens = self.config.rl, experience.batch
        run: Callable[..., Any] = self.workers.run
        columns: dict[str, Tensor] = {}
        has_several_updates = experience.num_groups > self._prompts_per_update or rl.num_epochs > 1
        with step.clock("old_log_prob"):
            if "old_logprobs" in self._columns or has_several_updates:
                readouts = Readouts(sum_pi_squared="sum_pi_squared" in self._columns)
                found = run(ModelWorker.infer, tokens, readouts)
                columns["old_logprobs"] = found.logprobs_T
                if found.sum_pi_squared_T is not None:
                    columns["sum_pi_squared"] = found.sum_pi_squared_T
        with step.clock("ref"):
            if "ref_logprobs" in self._columns:
                columns["ref_logprobs"] = run(ModelWorker.infer_logprobs, tokens, REFERENCE)
        with step.clock("teacher"):
            if self.teacher is not None:
                columns |= self.teacher.columns(tokens)
        with step.clock("values"):
            if "values" in self._columns:
                found = run(ModelWorker.infer, tokens, Readouts(last_values=True), CRITIC)
                columns["values"] = found.values_T
                experience = experience.with_rows(last_values=found.last_values_B)
        if "uniform" in self._columns:
            generator = torch.Generator().manual_seed(
                derive_seed(self.prompts.seed, f"step={step.global_number}/uniform")
            )
            # float64 is fine enough that no two tokens of a step have the same number.
            columns["uniform"] = torch.rand(
                tokens.num_tokens, generator=generator, dtype=torch.float64
            )
        if "positive" in self._columns:
            # 1 on the sampled tokens of right answers.
            correct_B = torch.tensor([each.correct for each in experience.samples]).float()
            mask_T = tokens.columns["loss_mask"]
            columns["positive"] = correct_B[tokens.sequence_index_T] * mask_T
        return experience.with_columns(**columns)

    def estimate_advantages(
        self, step: LoopStep, experience: Experience, kl_coef: float
    ) -> Experience:
        """Return the samples to train on, with `advantages` and, for a critic, `returns`.

        PF-PPO repeats and drops samples; each keeps its own advantage.

        Raises:
            RewardError, NonFiniteError: a compared component is absent, or a reward is not finite.
        """
        with step.clock("adv"):
            experience.check_components(self._compared)
            experience = experience.with_advantages(self._algorithm, kl_coef, self._options)
            pf_ppo = self._algorithm.pf_ppo
            if not pf_ppo.enable:
                return experience
            seed = derive_seed(self.prompts.seed, f"step={step.global_number}/pf_ppo")
            return experience.take(
                resample(experience.rewards_B, experience.group_index_B, pf_ppo, seed).tolist()
            )

    def update(self, step: LoopStep, experience: Experience, state: LoopState) -> Updates:
        """Train the critic, if there is one, then the policy, unless the critic still warms up.

        Raises:
            NonFiniteError: more than `max_num_poisoned_updates` were left out.
            WeightSyncError: the sampler does not sample from the distribution that is trained.
        """
        rl, critic, num_left_out = self.config.rl, self.config.rl.critic, state.num_poisoned
        of_critic: list[TrainMetrics] = []
        if critic is not None:
            loss_fn = ValueObjective(critic.cliprange_value)
            with step.clock("update_critic"):
                of_critic, num_left_out = self._update_role(
                    CRITIC, experience, loss_fn, critic.num_epochs or rl.num_epochs, num_left_out
                )
            fault("rl.critic_updated")
        of_policy: list[TrainMetrics] = []
        # Count the critic's own steps: a new critic may start in any round.
        if critic is None or state.num_critic_steps >= critic.num_warmup_steps:
            with step.clock("update_actor"):
                of_policy, num_left_out = self._update_role(
                    POLICY, experience, self._loss_fn, rl.num_epochs, num_left_out
                )
            self._gate.check([update.metrics for update in of_policy])
        return Updates(
            tuple(of_policy),
            tuple(of_critic),
            trained_critic=critic is not None,
            num_poisoned=num_left_out - state.num_poisoned,
        )

    def _update_role(
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
        for mini_batch in numbered.mini_batches(self._prompts_per_update, num_epochs):
            found = self.workers.run(ModelWorker.train, mini_batch, loss_fn, role)
            update = self._guard.taken(
                found, mini_batch, experience.name_of, role, num_before=num_left_out
            )
            if update is None:
                num_left_out += 1
            else:
                taken.append(update)
        return taken, num_left_out

    def _publish(self, version: int, step: LoopStep | None = None) -> int:
        """Publish the policy's weights if the engines do not serve them; return the bytes sent.

        Raises:
            WeightSyncError: an engine holds other weights, or does not compute with them.
        """
        if self._is_serving:
            return 0
        with step.clock("update_weights") if step else nullcontext():
            report = self.rollout.publish(version, self._probe)
        self._is_serving = True
        return report.sent.num_bytes

    def _record(
        self,
        step: LoopStep,
        collected: Collector,
        experience: Experience,
        updates: Updates,
        state: LoopState,
        num_sync_bytes: int,
    ) -> None:
        """Record a finished step; `state` is after it.

        Raises:
            WeightSyncError: the sampler does not sample from the distribution that is trained.
            NothingToTrainOnError: more than `max_num_skipped_steps` in a row were skipped.
        """
        untrained: dict[str, float] = {}
        if not updates.policy and (scored := collected.scored().batch).num_sequences:
            with step.clock("old_log_prob"):
                logprobs_T = self.workers.run(ModelWorker.infer_logprobs, scored)
            untrained = untrained_differences(logprobs_T, scored)
            self._gate.check([untrained])
        metrics = step_metrics(collected, experience, updates, step.clock, self.workers.world_size)
        metrics |= {
            **self.workers.run(ModelWorker.performance_metrics),
            **untrained,
            "training/global_step": float(step.global_number),
            "training/policy_version": float(state.version),
            NUM_POISONED: float(state.num_poisoned),
            "rollout/sync_bytes": float(num_sync_bytes),
            "rollout/num_restarts": float(self.rollout.num_restarts),
            "training/epoch": self.prompts.epoch(step.global_number),
        }
        self.progress.record(step.global_number, step.number, metrics, step.clock)
        limit = self.config.rl.max_num_skipped_steps
        if state.num_skipped > limit:
            raise NothingToTrainOnError(
                f"step {step.number}: {state.num_skipped} steps in a row had nothing to train on, "
                f"more than rl.max_num_skipped_steps {limit}: all samples were aborted, unscored, "
                "in groups of equal scores or left out by the estimator; look at the rewards of "
                "the last steps, take prompts that the policy sometimes solves, or raise the limit"
            )
