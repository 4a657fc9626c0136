"""The data plane's part of the exception tree; imports without torch.

    infra.errors.PipelineError
    ├── EngineError
    │   ├── NonFiniteError            NaN or inf before an optimizer step, on any rank
    │   ├── CheckpointError           a checkpoint is absent, incomplete or of another run
    │   ├── WeightSyncError           served weights are not the trained ones
    │   ├── CollectiveError           ranks could not exchange something; names the group
    │   ├── WorkerError               a rank died or does not answer
    │   ├── RolloutError              a rollout engine broke a promise of its interface
    │   │   └── ReplicaLostError      it is of no use any more, and another may take its place
    │   └── NothingToTrainOnError     too many RL steps in a row without a usable sample
    └── RewardError                   a reward function itself is broken (not one sample)

The rest of the tree is in `infra.errors`.
"""

from infra.errors import PipelineError


class EngineError(PipelineError):
    """Base of the errors of the engine library."""


class NonFiniteError(EngineError):
    """A loss, gradient, reward, advantage or logprob is NaN or infinite."""


class CheckpointError(EngineError):
    """A checkpoint is absent, incomplete, damaged or belongs to another run."""


class WeightSyncError(EngineError):
    """The weights a rollout engine serves are not the weights that were trained."""


class CollectiveError(EngineError):
    """A collective failed, or not all ranks came in time; the text names the process group."""


class WorkerError(EngineError):
    """A worker rank died, or did not answer before its deadline."""


class RolloutError(EngineError):
    """A rollout engine broke a promise of its interface."""


class ReplicaLostError(RolloutError):
    """A rollout engine died or does not answer: another one may take its place."""


class NothingToTrainOnError(EngineError):
    """Too many RL steps in a row had no sample that teaches anything."""


class RewardError(PipelineError):
    """A reward function is broken as a whole, or too many samples could not be scored."""
