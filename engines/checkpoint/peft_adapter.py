"""Write a LoRA adapter as PEFT does; PEFT and vLLM load it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from engines.checkpoint.tensor_files import write_tensors
from engines.config.training import LoraConfig

_METADATA = {"format": "pt"}


def write_peft_adapter(
    path: Path,
    tensors: Mapping[str, Tensor],
    lora: LoraConfig,
    target_modules: Sequence[str] | str,
    heads: Sequence[str] = (),
) -> None:
    """Write an adapter into an existing directory.

    Tensors are whole, on the CPU, named by module with `lora_A.weight`, `lora_B.weight` and
    `lora_magnitude_vector`. `target_modules` are last parts of module names, or one regular
    expression for whole names; `heads` are modules that were trained in full.
    """
    named = {f"base_model.model.{name}": tensor for name, tensor in sorted(tensors.items())}
    write_tensors(named, path / "adapter_model.safetensors", metadata=_METADATA)
    config = {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if heads else "CAUSAL_LM",
        "modules_to_save": list(heads) or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_dora": lora.use_dora,
        "target_modules": target_modules if isinstance(target_modules, str) else [*target_modules],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
