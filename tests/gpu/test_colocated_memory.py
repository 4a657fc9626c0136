"""Memory of one device by phase, when the rollout engine is in the training rank.

The bounds are those of `docs/guides/choose-a-layout.md`; the CPU half runs the same phases.
"""

import gc
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_beside
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from hardware.base import PlatformBase

SLACK = 0.1
"""Of the bytes of the float32 weights: buffers, and what the allocator rounds up."""
REQUESTS = [RolloutRequest("p", tuple(range(4, 40)), SamplingParams(16), tuple(range(8)))]
BATCH = TokenBatch.from_sequences([list(range(4, 40))] * 4, loss_mask=[[0] + [1] * 35] * 4)


def _settled_bytes(platform: PlatformBase) -> int:
    """Allocated bytes without garbage and cuBLAS's workspaces.

    Those are 32 MiB for each thread that multiplied: far more than this model, and no part of what
    a phase holds.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
    return platform.memory_allocated_bytes()


@pytest.mark.parametrize("offload", [False, True])
def test_phases_hold_what_the_guide_says(
    platform: PlatformBase, model_dir: Path, tmp_path: Path, offload: bool
) -> None:
    spec = WorkerSpec(
        roles={
            POLICY: RoleSpec(
                ModelSource(model_dir),
                TrainingConfig(dtype="float32", param_offload=offload, optimizer_offload=offload),
                OptimizerConfig(lr=1e-2),
                total_num_steps=10,
            )
        },
        serving_dir=model_dir,
        rollout=RolloutConfig(timeout_s=120.0),
        temperature=1.0,
        platform=platform.vendor_name,
        seed=0,
    )
    before_bytes = _settled_bytes(platform)
    with ExitStack() as stack:
        workers, rollout, _ = launch_policy_beside(spec, {}, tmp_path)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(rollout))
        weights_bytes = rollout.publish(0).sent.num_bytes
        for version in (1, 2):
            rollout.generate(REQUESTS)
            awake_bytes = platform.memory_allocated_bytes()
            rollout.sleep()
            asleep_bytes = platform.memory_allocated_bytes()
            workers.run(ModelWorker.train, BATCH, SupervisedLoss())
            trained_bytes = _settled_bytes(platform) - before_bytes
            rollout.publish(version)
            if platform.device_name != "cpu":
                assert awake_bytes - asleep_bytes >= weights_bytes
                # Weights and both moments of AdamW stay, or nothing does.
                held = 0 if offload else 3 * weights_bytes
                assert trained_bytes <= held + SLACK * weights_bytes
    assert rollout.num_restarts == 0
