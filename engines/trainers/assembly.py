"""Build the parts of a round from its configuration and the launched workers and engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.rollout import Rollout
from engines.controller.worker_group import WorkerGroup
from engines.trainers.collector import Sampler
from engines.trainers.guards import MismatchGate, PoisonGuard, WeightProbe
from engines.trainers.loop_state import LoopState
from engines.trainers.progress import StageProgress, TrainedSteps
from engines.trainers.prompts import PromptSource
from engines.trainers.recorder import Recorder, SampleKeeper
from engines.trainers.rl import RLRound
from engines.trainers.rollout_batch import Preparer
from engines.trainers.scoring import CompletionScorer
from engines.trainers.teacher import Teacher
from engines.trainers.updater import RoundObjective, Updater


@dataclass(frozen=True)
class RoundInputs:
    """Inputs of a round, besides its configuration.

    Attributes:
        workers: ranks that hold the policy, with the round's first weights loaded.
        probe_prompt: token ids for the check of each engine against the trainer after a sync.
        before: counters of the previous round; None for the first.
        attempt_dir: directory of the kept samples; None keeps none.
        teacher: as in `Preparer`.
    """

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


def assemble(config: RLRoundStageConfig, inputs: RoundInputs) -> RLRound:
    """Return the parts of a round before its first step."""
    rl, workers, prompts = config.rl, inputs.workers, inputs.prompts
    training_dtype = config.training.dtype
    rollout_dtype = config.rollout.dtype or training_dtype
    gate = MismatchGate.of(rl.mismatch, training_dtype, rollout_dtype)
    infer_logprobs = partial(workers.run, ModelWorker.infer_logprobs)
    probe = WeightProbe(inputs.probe_prompt, rl.sampling.temperature, gate, infer_logprobs)
    setting = "rl.max_num_poisoned_updates"
    guard = PoisonGuard(workers, rl.max_num_poisoned_updates, setting, inputs.progress.say)
    keeper = SampleKeeper(config, workers.run, inputs.scorer.tokenizer, inputs.attempt_dir)
    return RLRound(
        num_steps=rl.num_steps_per_round,
        start=LoopState.at_start(rl, config.round, inputs.before),
        workers=workers,
        sampler=Sampler(config, inputs.rollout, prompts, inputs.scorer, probe, workers.place),
        preparer=Preparer(rl, workers.run, prompts.seed, inputs.vocab_size, inputs.teacher),
        objective=RoundObjective(rl, prompts.seed),
        updater=Updater(rl, workers, gate, guard),
        recorder=Recorder(rl, workers, inputs.rollout, prompts, gate, keeper, inputs.progress),
        progress=inputs.progress,
    )
