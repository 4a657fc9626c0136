"""Writing tensors by their names on disk into a model that fuses them in memory."""

from pathlib import Path

import pytest
import torch
from rlhf.testing.tiny_models import SHAPES, write_tiny_models
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines.checkpoint.hub_names import hub_slots


@pytest.mark.parametrize("model_type", SHAPES)
def test_what_is_written_by_slots_is_what_transformers_loads(
    tmp_path: Path, model_type: str
) -> None:
    write_tiny_models(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / model_type, dtype=torch.float32)
    empty = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    parameters = dict(empty.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        slots = hub_slots(empty)
        stored = load_file(tmp_path / model_type / "model.safetensors")
        assert slots.keys() == stored.keys()
        for name, tensor in stored.items():
            slots[name].view(parameters[slots[name].parameter]).copy_(tensor)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameters[name], parameter), name
