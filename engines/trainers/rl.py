"""THE loop: one round of RL, step by step.

Promises: everything random in a step is derived from (seed, round, step), so a round that was
killed continues from its newest valid step checkpoint and ends bitwise where an uninterrupted
one does; every step measures how far the sampler's logprobs are from the trainer's; a step
without a usable sample is skipped and counted.
What each line stands for is in its own module: prompts, experience, rl_metrics, and the
`PolicyWorker` whose methods `run` calls on every rank.
"""

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.stages import RLRoundStageConfig
from engines.controller.policy_worker import PolicyWorker
from engines.controller.worker_group import WorkerGroup
from engines.trainers.experience import Collector
from engines.trainers.mismatch import MeasuredObjective, check_mismatch
from engines.trainers.phases import PhaseClock
from engines.trainers.progress import StageProgress
from engines.trainers.prompts import PromptSource
from engines.trainers.rl_metrics import step_metrics
from engines.trainers.scoring import CompletionScorer


class RLTrainer:
    """Trains a policy for one round.

    Args:
        config: the round.
        workers: ranks that hold the policy, with the round's first weights loaded.
        prompts: what is sampled in each step.
        scorer: turns completions into scored samples.
        progress: journal, step checkpoints and job clock.
    """

    def __init__(
        self,
        config: RLRoundStageConfig,
        workers: WorkerGroup,
        prompts: PromptSource,
        scorer: CompletionScorer,
        progress: StageProgress,
    ) -> None:
        self.config, self.workers, self.prompts = config.rl, workers, prompts
        self.scorer, self.progress = scorer, progress
        objective = policy_loss_fn(config.rl.algorithm, config.rl.sampling.max_new_tokens)
        self.loss_fn = MeasuredObjective(objective)
        self.previous_steps = (config.round - 1) * config.rl.num_steps_per_round

    def run(self) -> None:
        """Every step of the round that no step checkpoint holds yet."""
        last_done = self.progress.resume(self.workers).step
        with self.progress.clock("train"):
            self.workers.run(PolicyWorker.sync_weights, self.previous_steps + last_done)
        for step in range(last_done + 1, self.config.num_steps_per_round + 1):
            self.step(step)

    def step(self, step: int) -> None:
        """One RL step: generate, score, filter, train, sync, record, checkpoint.

        Args:
            step: 1-based within the round.
        """
        config, run, clock = self.config, self.workers.run, PhaseClock()
        algorithm, version = config.algorithm, self.previous_steps + step

        collector = Collector(config.batch_size_prompts, algorithm.filter_groups)
        for prompts in self.prompts.generation_batches(version):
            with clock("gen"):
                completions = run(PolicyWorker.generate, prompts.requests)
            with clock("reward"):
                scored = self.scorer.score(prompts, completions)
            collector.add(scored)
            if collector.full:
                break
        experience = collector.experience()

        updates = []
        if experience.num_groups:
            with clock("old_log_prob"):
                # A single update is on-policy: its own pass yields the old logprobs.
                if experience.num_groups > config.prompts_per_update or config.num_epochs > 1:
                    old_T = run(PolicyWorker.infer_logprobs, experience.batch)
                    experience = experience.with_columns(old_logprobs=old_T)
            with clock("ref"):
                if algorithm.use_kl_loss:
                    ref_T = run(PolicyWorker.infer_reference_logprobs, experience.batch)
                    experience = experience.with_columns(ref_logprobs=ref_T)
            with clock("adv"):
                experience = experience.with_advantages(algorithm)
            with clock("update_actor"):
                for mini_batch in experience.mini_batches(
                    config.prompts_per_update, config.num_epochs
                ):
                    updates.append(run(PolicyWorker.train_mini_batch, mini_batch, self.loss_fn))
            check_mismatch(updates, config.max_logprob_diff)
            with clock("update_weights"):
                run(PolicyWorker.sync_weights, version)

        metrics = step_metrics(collector, experience, updates, clock, self.workers.world_size)
        metrics |= run(PolicyWorker.performance_metrics)
        metrics["training/global_step"] = float(version)
        metrics["training/epoch"] = self.prompts.epoch(version)
        self.progress.record(version, step, metrics, clock)
        self.progress.checkpoint_when_due(step, self.workers)
