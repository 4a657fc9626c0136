"""Take the samples of a step: generated from the published weights, scored and filtered.

Promises: samples of other weights, or of a step with too many unfinished ones, are not trained on.
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
    """Samples and scores generation batches; `probe` checks each engine after a weight sync."""

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
        """Generate and score until the step has enough groups.

        With any group, the engines sleep afterwards, until `publish`.

        Raises:
            RolloutError: other weights sampled, or too many samples timed out.
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
        """Publish the policy's weights if the engines do not serve them; return the bytes sent.

        Raises:
            WeightSyncError: an engine holds other weights, or does not compute with them.
        """
        if self._is_serving:
            return 0
        with step.clock("update_weights") if step else nullcontext():
            report = self._rollout.publish(version, self._probe)
        self._is_serving = True
        return report.sent.num_bytes
