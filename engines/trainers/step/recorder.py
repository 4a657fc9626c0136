"""Record a step: its metrics, and some of its samples for people.

Promises: every step measures the difference between sampler and trainer; a run with too many
skipped steps in a row is stopped.
"""

from engines.config.sections import RLConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.rollout import Rollout
from engines.controller.worker_group import WorkerGroup
from engines.errors import NothingToTrainOnError
from engines.trainers.guards.mismatch import MismatchGate, untrained_differences
from engines.trainers.guards.poison import NUM_POISONED
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.loop.progress import StageProgress
from engines.trainers.samples.prompts import PromptSource
from engines.trainers.step.collector import Collector
from engines.trainers.step.experience import Experience
from engines.trainers.step.kept_samples import SampleKeeper
from engines.trainers.step.loop_state import LoopState
from engines.trainers.step.metrics import step_metrics
from engines.trainers.step.updates import Updates
from engines.types import TokenBatch


class Recorder:
    """Records steps into the journal and checks their sanity."""

    def __init__(
        self,
        config: RLConfig,
        workers: WorkerGroup,
        rollout: Rollout,
        prompts: PromptSource,
        gate: MismatchGate,
        keeper: SampleKeeper,
        progress: StageProgress,
    ) -> None:
        self._config, self._workers, self._rollout = config, workers, rollout
        self._prompts, self._gate, self._keeper = prompts, gate, keeper
        self._progress = progress

    def keep(self, step: LoopStep, collected: Collector, experience: Experience) -> None:
        """Keep samples of the step for people if it is due; called before its first update."""
        self._keeper.keep(step, experience if experience.num_groups else collected.scored())

    def record(
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
        run = self._workers.run
        untrained = {} if updates.policy else self._untrained(step, collected.scored().batch)
        metrics = step_metrics(collected, experience, updates, step.clock, self._workers.world_size)
        metrics |= run(ModelWorker.performance_metrics) | untrained
        metrics |= {
            "training/global_step": float(step.global_number),
            "training/policy_version": float(state.version),
            NUM_POISONED: float(state.num_poisoned),
            "rollout/sync_bytes": float(num_sync_bytes),
            "rollout/num_restarts": float(self._rollout.num_restarts),
            "training/epoch": self._prompts.epoch(step.global_number),
        }
        self._progress.record(step.global_number, step.number, metrics, step.clock)
        self._check_skipped(step, state.num_skipped)

    def _untrained(self, step: LoopStep, scored: TokenBatch) -> dict[str, float]:
        """Measure the difference between sampler and trainer if no policy update did."""
        if not scored.num_sequences:
            return {}
        with step.clock("old_log_prob"):
            logprobs_T = self._workers.run(ModelWorker.infer_logprobs, scored)
        found = untrained_differences(logprobs_T, scored)
        self._gate.check([found])
        return found

    def _check_skipped(self, step: LoopStep, num_skipped: int) -> None:
        limit = self._config.max_num_skipped_steps
        if num_skipped > limit:
            raise NothingToTrainOnError(
                f"step {step.number}: {num_skipped} steps in a row had nothing to train on, more "
                f"than rl.max_num_skipped_steps {limit}: all samples were aborted, unscored, in "
                "groups of equal scores or kept by no estimator; look at the rewards of the last "
                "steps, take prompts that the policy sometimes solves, or raise the limit"
            )
