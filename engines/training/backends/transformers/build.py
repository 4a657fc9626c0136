"""Build the transformers module of an engine: on one device, or without memory for sharding.

Promises: float32 weights whatever the files hold; a missing or unexpected weight is an error,
never a random value (the head of a value model may be absent: it starts at 0). The model stays
in evaluation mode: training and inference see the same log-probabilities. Sharded, each
rank reads only its slices from the safetensors files; an architecture whose tensors on disk are
not those in memory, names aside (transformers converts them), is loaded whole on each rank first.
"""

from collections.abc import Callable, Mapping, Set
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.architecture import (
    attention_refusal,
    class_refusal,
    position_refusal,
    text_settings,
)
from engines.checkpoint.model_directory import stored_tensor_names, without_progress_bars
from engines.training.backends.transformers.adapters import (
    add_adapter,
    base_name,
    initialize_adapter,
)
from engines.training.backends.transformers.kernels import (
    compile_layers,
    liger_kernels,
    use_kernels,
)
from engines.training.backends.transformers.slices import (
    disk_names_of,
    load_slices,
    unexpected_names,
)
from engines.training.backends.transformers.supported import check_model
from engines.training.backends.transformers.vision import (
    attention_names,
    language_model_prefix,
    sees_images,
)
from engines.training.model.attention import register_packed_attention
from engines.training.spec import VALUE_HEAD, EngineSpec, ModelType
from infra.errors import ConfigError

Shard = Callable[[PreTrainedModel], None]
"""Shards a model in place; its parameters become DTensors."""
Architecture = Callable[[PretrainedConfig], PreTrainedModel]
"""Makes a library's own class of a model, with `rl_varlen` attention, for the names on disk."""


def build_model(
    spec: EngineSpec,
    shard: Shard | None,
    *,
    load_weights: bool,
    architecture: Architecture | None = None,
    weights_on_host: bool = False,
) -> PreTrainedModel:
    """The model of an engine, with its adapter, what is frozen frozen, on its device.

    Args:
        spec: of the engine.
        shard: None keeps the model whole on this rank's device.
        load_weights: False leaves the weights undefined.
        architecture: called under the meta device in place of transformers' own class; it needs
            a `shard`.
        weights_on_host: `shard` wants weights in host memory; buffers go to the device.

    Returns:
        The model.

    Raises:
        ConfigError: the directory does not hold such a model, or a pattern or adapter target
            fits nothing in it.
    """
    device = spec.platform.device()
    if shard is None and load_weights:
        model = _prepared(_from_pretrained(spec.hf_dir, spec.model_type), spec)
        nn.Module.to(model, device)
        return _with_adapter_values(model, spec)
    model = build_on_meta(spec.hf_dir, spec.model_type, architecture)
    disk_names = disk_names_of(model, spec.hf_dir) if load_weights else None
    direct = not load_weights or disk_names is not None
    if not direct and architecture is not None:
        raise ConfigError(
            "model.path",
            f"{spec.hf_dir} is a {type(model).__name__}, whose weights have another form on disk "
            f"than in memory, which {spec.training.backend} cannot load; use fsdp2",
        )
    if not direct:
        model = _from_pretrained(spec.hf_dir, spec.model_type)
    elif load_weights:
        check_stored_names(spec.hf_dir, spec.model_type)
    model = _prepared(model, spec)
    if shard is not None:
        shard(model)
    if not direct:
        if not weights_on_host:
            nn.Module.to(model, device)
        return _with_adapter_values(_with_buffers_on(model, device), spec)
    _materialize(model, torch.device("cpu") if weights_on_host else device)
    _with_buffers_on(model, device)
    if disk_names is not None:
        load_slices(model, spec.hf_dir, disk_names)
    return _with_adapter_values(model, spec)


def build_on_meta(
    hf_dir: Path, model_type: ModelType, architecture: Architecture | None = None
) -> PreTrainedModel:
    """The architecture alone: parameters have shapes and no memory."""
    config = _config(hf_dir, model_type)
    with torch.device("meta"):
        if architecture is not None:
            return _checked(architecture(config), hf_dir)
        model = _auto_class(model_type, config, hf_dir).from_config(
            config, dtype=torch.float32, attn_implementation=attention_names(config)
        )
    return _checked(model, hf_dir)


def check_stored_names(hf_dir: Path, model_type: ModelType) -> None:
    """Refuse weights on disk that would be left out: without them the others may mean nothing.

    Args:
        hf_dir: of the model; headers are read.
        model_type: of the engine that loads it.

    Raises:
        ConfigError: names some of them.
    """
    model, stored = build_on_meta(hf_dir, model_type), set(stored_tensor_names(hf_dir))
    unexpected = unexpected_names(model, stored)
    _refuse_misfits(hf_dir, {"unexpected": _new_to_both(unexpected, hf_dir, model_type)})


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    # transformers' own way needs layers in training mode, and with it their dropout.
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the architecture declares as not to be split."""
    wanted = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _prepared(model: PreTrainedModel, spec: EngineSpec) -> PreTrainedModel:
    """Faster kernels and adapter added, gradients switched off where nothing is trained."""
    training = spec.training
    if training.use_liger:
        use_kernels(model, liger_kernels(spec.platform.device()))
    if training.use_torch_compile:
        compile_layers(decoder_layers(model), training.torch_compile_backend)
    if spec.optimizer is None:
        # Without an optimizer an adapter could only be identity: checkpoints are folded.
        return model.requires_grad_(False)
    if training.lora is not None:
        add_adapter(model, training.lora, inside=language_model_prefix(model))
    for pattern in training.frozen_parameters:
        frozen = [p for name, p in model.named_parameters() if fnmatch(base_name(name), pattern)]
        if not frozen:
            raise ConfigError("training.frozen_parameters", f"{pattern!r} fits no parameter")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("training.frozen_parameters", "nothing is left to train; remove some")
    return model


def _with_adapter_values(model: PreTrainedModel, spec: EngineSpec) -> PreTrainedModel:
    if spec.training.lora is not None and spec.optimizer is not None:
        initialize_adapter(dict(model.named_parameters()), spec.seed)
    return model


def _auto_class(model_type: ModelType, config: PretrainedConfig, hf_dir: Path) -> Any:
    """The class of transformers that makes the model; refuses one whose attention is its own."""
    if model_type == "value_model":
        auto_class: Any = AutoModelForTokenClassification
    else:
        auto_class = AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    _refuse(class_refusal(auto_class, config), hf_dir)
    return auto_class


def _refuse(refusal: str | None, hf_dir: Path) -> None:
    if refusal is not None:
        raise ConfigError(
            "model.path",
            f"{hf_dir} {refusal}, so it cannot train on packed sequences; choose another "
            "architecture",
        )


def _with_buffers_on(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def _from_pretrained(hf_dir: Path, model_type: ModelType) -> PreTrainedModel:
    config = _config(hf_dir, model_type)
    with without_progress_bars():
        loaded: Any = _auto_class(model_type, config, hf_dir).from_pretrained(
            hf_dir,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention_names(config),
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, info = loaded
    missing = {name for name in info["missing_keys"] if not _is_value_head(name, model_type)}
    unexpected = _new_to_both(info["unexpected_keys"], hf_dir, model_type)
    _refuse_misfits(
        hf_dir,
        {"missing": missing, "mismatched": info["mismatched_keys"], "unexpected": unexpected},
    )
    for name, parameter in model.named_parameters():
        if name in info["missing_keys"]:
            nn.init.zeros_(parameter)
    return _checked(model, hf_dir)


def _new_to_both(unexpected: Set[str], hf_dir: Path, model_type: ModelType) -> Set[str]:
    """What the language model does not have either, from which a value model leaves the head."""
    if not unexpected or model_type != "value_model":
        return unexpected
    return unexpected_names(build_on_meta(hf_dir, "language_model"), unexpected)


def _refuse_misfits(hf_dir: Path, names_by_kind: Mapping[str, Set[Any]]) -> None:
    wrong = {kind: sorted(names)[:3] for kind, names in names_by_kind.items() if names}
    if wrong:
        raise ConfigError(
            "model.path",
            f"{hf_dir} does not fit its own config: {wrong}; need its weights and no others; give "
            "the directory as it was published, unquantized",
        )


def _is_value_head(name: str, model_type: ModelType) -> bool:
    return model_type == "value_model" and name.startswith(VALUE_HEAD)


def _checked(model: PreTrainedModel, hf_dir: Path) -> PreTrainedModel:
    # It would ignore the registered attention and let sequences see each other.
    _refuse(attention_refusal(type(model)), hf_dir)
    _refuse(position_refusal(model), hf_dir)
    # For good: in training mode there is dropout, dropped layers, noise of routers.
    return model.eval()


def _config(hf_dir: Path, model_type: ModelType) -> PretrainedConfig:
    register_packed_attention()
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False)
    config.use_cache = False
    if model_type == "value_model":
        config.num_labels = 1
    check_model(hf_dir, text_settings(config))
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
