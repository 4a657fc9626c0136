"""Takes the samples of a step: generated from the published weights, scored and filtered.

Promises: nothing is trained on that other weights than the published ones sampled, nor a step of
which too many samples were unfinished at the deadline.
"""

from contextlib import nullcontext

from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.rollout import Rollout
from engines.rollout.publishing import Probe
from engines.trainers.guards.aborted import check_aborted
from engines.trainers.guards.mismatch import check_versions
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.samples.prompts import PromptSource
from engines.trainers.samples.scoring import CompletionScorer
from engines.trainers.step.collector import Collector
from engines.trainers.step.experience import Place


class Sampler:
    """See the module.

    Args:
        config: of the round.
        rollout: samples from the weights that it was last given.
        prompts: what is sampled in each step.
        scorer: turns completions into scored samples.
        probe: what each engine must pass after a sync, before it serves.
        place: puts a batch where the ranks read it: `WorkerGroup.place`.
    """

    def __init__(
        self,
        config: RLRoundStageConfig,
        rollout: Rollout,
        prompts: PromptSource,
        scorer: CompletionScorer,
        probe: Probe,
        place: Place,
    ) -> None:
        self._config, self._timeout_s = config.rl, config.rollout.timeout_s
        self._rollout, self._prompts, self._scorer = rollout, prompts, scorer
        self._probe, self._place = probe, place
        self._is_serving = False
        self._see = prompts.images.processor.of_sequences if prompts.images else None

    def take(self, step: LoopStep, version: int) -> Collector:
        """Generate and score until the step has the groups it trains on.

        Where it has some, the engines sleep until the next `publish`.

        Args:
            step: phases `gen`, `reward` and `sleep`.
            version: of the weights that are served.

        Returns:
            Everything that was sampled, and the groups among it that are trained on.

        Raises:
            RolloutError: other weights sampled, or more samples than `max_aborted_frac` were
                unfinished at the deadline.
            RewardError: the reward function is broken, or left too many samples unscored.
        """
        config = self._config
        collector = Collector(
            config.batch_size_prompts, config.algorithm.filter_groups, self._see, self._place
        )
        for prompts in self._prompts.generation_batches(step.global_number):
            with self._scorer.begin(prompts) as scoring:
                with step.clock("gen"):
                    completions = self._rollout.generate(prompts.all_requests, scoring.accept)
                check_versions(completions, version)
                check_aborted(completions, config.max_aborted_frac, self._timeout_s)
                with step.clock("reward"):
                    scored = scoring.finish(completions)
            collector.add(scored)
            if collector.full:
                break
        if collector.num_groups:
            with step.clock("sleep"):
                self._rollout.sleep()
            self._is_serving = False
        return collector

    def publish(self, version: int, step: LoopStep | None = None) -> int:
        """Have the engines serve the policy's weights; those that do so already are left alone.

        Args:
            version: of the weights.
            step: phase `update_weights`; None before the first.

        Returns:
            Bytes that were sent.

        Raises:
            WeightSyncError: an engine holds something else, or does not compute with it.
        """
        if self._is_serving:
            return 0
        with step.clock("update_weights") if step else nullcontext():
            report = self._rollout.publish(version, self._probe)
        self._is_serving = True
        return report.sent.num_bytes
