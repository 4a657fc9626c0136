"""Loads what every rank of a test needs; see `rlhf.testing.forked`.

Nothing of a platform or a backend that changes something for others by being loaded.
"""

import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import engines.training.base  # noqa: F401
