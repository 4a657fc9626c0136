"""What a decode step launches: a count, since seconds depend on the machine."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from engines.rollout.transformers.inference_model import InferenceModel
from engines.rollout.transformers.running_batch import RunningBatch
from engines.rollout.transformers.scheduler import Prefix, Sample
from engines.types import RolloutRequest, SamplingParams

MAX_NUM_OPS = 171
"""Of two layers, the head and the draw, views among them; lower it when a step needs fewer."""


class _Count(TorchDispatchMode):
    """Counts the operators of torch that run inside it."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def _num_ops(hf_dir: Path, num_rows: int) -> int:
    model = InferenceModel(hf_dir, torch.float32, torch.device("cpu"))
    for parameter in model._model.parameters():
        parameter.zero_()
    seeds = tuple(range(num_rows))
    request = RolloutRequest("prompt", (5, 6, 7), SamplingParams(64), seeds)
    samples = tuple(Sample(request, place, 0) for place in range(num_rows))
    batch = RunningBatch(model, num_rows, 512)
    batch.join([Prefix(request.prompt_ids, samples)], None)
    with _Count() as count:
        batch.decode()
    assert len(batch.samples) == num_rows
    return count.num_ops


def test_a_decode_step_launches_as_much_for_many_rows_as_for_few(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    config.save_pretrained(tmp_path)
    few, many = _num_ops(tmp_path, 4), _num_ops(tmp_path, 64)
    assert many == few
    assert many <= MAX_NUM_OPS
