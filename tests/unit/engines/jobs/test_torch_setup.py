"""What a job does before it computes."""

import gc

import torch

from engines.config.stages import Runtime
from engines.jobs.torch_setup import prepare_torch


def test_threads_and_collections() -> None:
    num_threads = torch.get_num_threads()
    gc.unfreeze()
    try:
        prepare_torch(Runtime(platform="cpu", num_threads=1))
        assert torch.get_num_threads() == 1
        # What is imported by now is most of what a process ever holds.
        assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    finally:
        torch.set_num_threads(num_threads)
        gc.unfreeze()
