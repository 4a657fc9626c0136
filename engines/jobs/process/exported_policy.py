"""Exports the merged weights of a committed policy, from which another model starts."""

import shutil
from pathlib import Path

from engines.training.backends.merging import merge_checkpoint
from engines.training.spec import ModelSource


def exported_policy(policy_dir: Path, target: Path, max_shard_bytes: int = 2**30) -> ModelSource:
    """Write the weights of a `policy` artifact in float32, an adapter merged in, to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    merge_checkpoint(policy_dir, target, "float32", max_shard_bytes)
    return ModelSource(target)
