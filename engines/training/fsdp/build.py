"""Build a causal LM for training: on one process as it is, on several sharded by FSDP2.

Promises: float32 master weights whatever the files hold; a missing or unexpected weight is an
error, never a random value. On several ranks the model is made without memory, sharded, and
each rank reads only its slices from the safetensors files; an architecture whose names on
disk differ from those in memory (transformers converts them) is loaded whole on each rank first.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import load_sharded
from engines.errors import CheckpointError
from engines.models import stored_tensor_names, without_progress_bars
from engines.training.attention import ATTENTION_NAME, register_packed_attention
from infra.errors import ConfigError

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


def build_plain(hf_dir: Path, device: torch.device, *, load_weights: bool) -> PreTrainedModel:
    """The whole model on one device, float32."""
    if load_weights:
        return _moved(_from_pretrained(hf_dir), device)
    model = _on_meta(hf_dir)
    _materialize(model, device)
    return model


def build_sharded(
    hf_dir: Path,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    reshard_after_forward: bool,
    load_weights: bool,
) -> PreTrainedModel:
    """The model with every parameter sharded over the mesh; one FSDP unit per decoder layer.

    Args:
        hf_dir: model directory.
        mesh: one dimension, all ranks.
        device: of this rank.
        compute_dtype: of the forward and backward pass; gradients are reduced in float32.
        reshard_after_forward: free gathered weights between forward and backward.
        load_weights: False leaves them undefined.

    Returns:
        The root, an `FSDPModule`.
    """
    model = _on_meta(hf_dir)
    names = {name for name, _ in named_state(model)}
    direct = not load_weights or (
        HubNames(model).identical and names <= set(stored_tensor_names(hf_dir))
    )
    if not direct:
        model = _from_pretrained(hf_dir)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root's weights are needed at the end of forward and at the start of backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if not direct:
        return _moved(model, device)
    _materialize(model, device)
    if load_weights:
        _load_slices(model, hf_dir)
    return model


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    # transformers renamed the method; the old name warns in releases that have the new one.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the architecture declares as not to be split."""
    wanted = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _on_meta(hf_dir: Path) -> PreTrainedModel:
    config = _config(hf_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    return _checked(model, hf_dir)


def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    nn.Module.to(model, device)
    return model


def _from_pretrained(hf_dir: Path) -> PreTrainedModel:
    with without_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            hf_dir,
            config=_config(hf_dir),
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, info = loaded
    wrong = {k: sorted(info[k])[:3] for k in ("missing_keys", "mismatched_keys") if info[k]}
    if wrong:
        raise ConfigError("model.path", f"{hf_dir} does not fit its own config: {wrong}")
    return _checked(model, hf_dir)


def _checked(model: PreTrainedModel, hf_dir: Path) -> PreTrainedModel:
    # Such a model ignores the registered attention and would let sequences see each other.
    if not model._supports_attention_backend:
        raise ConfigError(
            "model.path",
            f"{hf_dir} is a {type(model).__name__}, whose attention cannot be replaced, so it "
            "cannot train on packed sequences; choose another architecture",
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # training and inference must see the same log-probabilities
    return model


def _config(hf_dir: Path) -> PretrainedConfig:
    register_packed_attention()
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False)
    config.use_cache = False
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _PACKABLE_LAYERS:
        raise ConfigError(
            "model.path",
            f"{hf_dir} has layers of type {', '.join(sorted(kinds - _PACKABLE_LAYERS))}, which "
            "cannot train on packed sequences; choose an architecture with full attention",
        )
    return config


def _materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Give a model on the meta device memory; weights stay undefined, computed buffers do not."""
    model.to_empty(device=device)
    model.tie_weights()
    persistent = set(model.state_dict(keep_vars=True))
    computed = {name.rpartition(".")[0] for name, _ in model.named_buffers()
                if name not in persistent}  # fmt: skip
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in computed:
                model._init_weights(module)


def _load_slices(model: PreTrainedModel, hf_dir: Path) -> None:
    try:
        load_sharded(hf_dir, dict(named_state(model)))
    except CheckpointError as error:
        raise ConfigError("model.path", f"does not fit its own config: {error}") from error
