"""The data plane's part of the exception tree; imports without torch.

    infra.errors.PipelineError
    ├── EngineError
    │   ├── NonFiniteError            NaN or inf before an optimizer step, on any rank
    │   ├── CheckpointError           a checkpoint is absent, incomplete or of another run
    │   ├── WeightSyncError           served weights are not the trained ones
    │   ├── CollectiveError           a collective failed; names the group
    │   ├── WorkerError               a rank died or does not answer
    │   ├── RolloutError              a rollout engine broke the contract of its interface
    │   │   └── ReplicaLostError      the replica is lost; another may replace it
    │   └── NothingToTrainOnError     too many RL steps in a row without a usable sample
    └── RewardError                   a reward is broken, or too many samples have no score

The rest of the tree is in `infra.errors`.
"""

from infra.errors import PipelineError


class EngineError(PipelineError):
    """Base class of the errors of the engine library."""


class NonFiniteError(EngineError):
    """A loss, gradient, reward, advantage or logprob is NaN or infinite."""


class CheckpointError(EngineError):
    """A checkpoint is absent, incomplete, damaged or belongs to another run."""


class WeightSyncError(EngineError):
    """The weights that a rollout engine serves differ from the trained ones."""


class CollectiveError(EngineError):
    """A collective failed or a rank was late; the text names the process group."""


class WorkerError(EngineError):
    """A worker rank died, or did not answer before its deadline."""


class RolloutError(EngineError):
    """A rollout engine violated its interface."""


class ReplicaLostError(RolloutError):
    """A replica died or does not answer; a new replica may take its place."""


class NothingToTrainOnError(EngineError):
    """Too many RL steps in a row had no usable sample."""


class RewardError(PipelineError):
    """A reward function is broken as a whole, or too many samples could not be scored."""
