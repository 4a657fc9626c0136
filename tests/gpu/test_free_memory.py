"""What an update leaves free on the device, as another process sees it.

A rank's allocator may keep memory that holds no tensor, and then a colocated engine in a process of
its own cannot wake. Other processes on the device disturb the figure, so `gpu_check.py` runs this
file alone.
"""

import gc
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from engines.algorithms.supervised import SupervisedLoss
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_beside
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from hardware.base import PlatformBase

REQUESTS = [RolloutRequest("p", tuple(range(4, 40)), SamplingParams(16), tuple(range(8)))]
FREE_BYTES = "import torch; torch.cuda.init(); print(torch.cuda.mem_get_info()[0])"
CONTEXT_BYTES = 512 * 2**20
"""Of kernels that libraries load in the first update, and of cuBLAS's workspaces."""
MIN_PEAK_BYTES = 4 * CONTEXT_BYTES
"""What the update has to allocate at once, for a kept cache to be seen."""


def _free_for_another_process(platform: PlatformBase) -> int | None:
    """Free bytes of the device as a second process sees them; None on a CPU."""
    gc.collect()
    if platform.device_name == "cpu":
        return None
    platform.synchronize()
    asked = subprocess.run(
        [sys.executable, "-c", FREE_BYTES], capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 0, asked.stderr
    return int(asked.stdout)


def _batch(num_sequences: int, num_tokens: int) -> TokenBatch:
    rows = [[4 + (row + at) % 500 for at in range(num_tokens)] for row in range(num_sequences)]
    mask = [[0.0] + [1.0] * (num_tokens - 1)] * num_sequences
    return TokenBatch.from_sequences(rows, loss_mask=mask)


def test_an_update_leaves_its_memory_to_a_second_process(
    platform: PlatformBase, model_dir: Path, tmp_path: Path
) -> None:
    """A colocated engine wakes between two updates; the trainer's peak has to be free by then."""
    num_sequences = 2 if platform.device_name == "cpu" else 512
    batch = _batch(num_sequences, 512)
    role = RoleSpec(
        ModelSource(model_dir),
        TrainingConfig(max_tokens_per_micro_batch=batch.num_tokens, gradient_checkpointing=False),
        OptimizerConfig(lr=1e-3),
        total_num_steps=10,
    )
    rollout_config = RolloutConfig(timeout_s=120.0)
    spec = WorkerSpec({POLICY: role}, model_dir, rollout_config, 1.0, platform.vendor_name, seed=0)
    with ExitStack() as stack:
        workers, rollout, _ = launch_policy_beside(spec, {}, tmp_path)
        stack.enter_context(closing(workers))
        stack.enter_context(closing(rollout))
        rollout.publish(0)
        rollout.generate(REQUESTS)
        rollout.sleep()
        workers.run(ModelWorker.train, _batch(2, 64), SupervisedLoss())  # loads kernels
        before = _free_for_another_process(platform)
        start_bytes = platform.memory_allocated_bytes()
        workers.run(ModelWorker.train, batch, SupervisedLoss())
        after = _free_for_another_process(platform)
        if before is not None and after is not None:
            assert platform.max_memory_allocated_bytes() - start_bytes > MIN_PEAK_BYTES
            assert before - after < CONTEXT_BYTES
        rollout.publish(1)
    assert rollout.num_restarts == 0
