"""Builds the transformers module of an engine: on one device, or on the meta device for sharding.

Weights are float32; on an accelerator that computes in bfloat16, those of a model that does not
train, and those under an adapter, are bfloat16. Each pass would round float32 weights to the same
values, so no logprob changes; a merge adds the adapter to the rounded weights. The model stays in
evaluation mode, so that training and inference compute the same logprobs. Liger's kernels and
torch.compile make a model's layers faster.

Promises: a missing or unexpected weight is an error (but a value head may be absent and starts at
0). Ranks of a sharded model read only their slices, unless transformers converts tensors. Only the
given model changes, not transformers' classes.
Does not cover: attention (see `attention`), the output head (see `head`), rotary embeddings.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.architecture import (
    attention_refusal,
    class_refusal,
    position_refusal,
    text_settings,
)
from engines.checkpoint.hub_names import named_state
from engines.checkpoint.model_directory import stored_tensor_names, without_progress_bars
from engines.checkpoint.sharded import load_sharded
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import (
    add_adapter,
    base_name,
    initialize_adapter,
)
from engines.training.backends.transformers.vision import (
    attention_names,
    language_model_prefix,
    sees_images,
)
from engines.training.model.attention import register_packed_attention
from engines.training.spec import VALUE_HEAD, EngineSpec, ModelType
from engines.training.step.saved_tensors import recomputation_contexts
from engines.training.supported_models import check_packed
from infra.errors import ConfigError

_SETTING = "training.use_liger"
_PLAIN_NORMS = frozenset(
    {"llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Model types whose RMS norm scales by weight, as the kernel does, not by 1 + weight."""
NUM_VARIANTS = 64
"""Graphs of one kind of layer, beyond which torch runs it uncompiled. Models of one process, with
and without gradients, share its code; torch's own limit, 8, can be too few."""


@dataclass(frozen=True)
class FusedKernels:
    """rms_norm(x, weight, eps) = x / rms(x) * weight, and silu_mul(gate, up) = silu(gate) * up."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]


def liger_kernels(device: torch.device) -> FusedKernels:
    """Return Liger's kernels (arXiv:2410.10989).

    Raises:
        ConfigError: the package is not installed, or the device is a CPU.
    """
    if device.type == "cpu":
        raise ConfigError(_SETTING, "got true; Liger's kernels need a GPU; set it to false")
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise ConfigError(
            _SETTING, f"needs Liger ({error}); pip install 'rlhf-pipeline[liger]'"
        ) from error
    # Not in place: the overwritten gradient may be an activation that is still needed.
    return FusedKernels(
        lambda x, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False),
        cast(Any, LigerSiLUMulFunction).apply,
    )


def use_kernels(model: PreTrainedModel, kernels: FusedKernels) -> int:
    """Replace norms and gated feed-forward layers by kernels; return how many.

    Raises:
        ConfigError: the architecture's norm is not known to match the kernel.
    """
    kind = model.config.get_text_config().model_type
    if kind.removesuffix("_text") not in _PLAIN_NORMS:
        known = ", ".join(sorted(_PLAIN_NORMS))
        raise ConfigError(
            _SETTING, f"got true for a model of type {kind}; need {known}; or set it to false"
        )
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    gated = [m for m in model.modules() if _is_gated(m)]
    for module in norms:
        module.forward = partial(_norm, module, kernels)
    for module in gated:
        module.forward = partial(_gated, module, kernels)
    return len(norms) + len(gated)


def _is_gated(module: nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in parts) and isinstance(
        getattr(module, "act_fn", None), type(ACT2FN["silu"])
    )


def _norm(module: Any, kernels: FusedKernels, hidden_states: Tensor) -> Tensor:
    return kernels.rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _gated(module: Any, kernels: FusedKernels, x: Tensor) -> Tensor:
    return module.down_proj(kernels.silu_mul(module.gate_proj(x), module.up_proj(x)))


Shard = Callable[[PreTrainedModel], None]
"""Shards a model in place; its parameters become DTensors."""
Architecture = Callable[[PretrainedConfig], PreTrainedModel]
"""Creates a model of a library's own class, with `rl_varlen` attention and the names on disk."""


def build_model(
    spec: EngineSpec,
    shard: Shard | None,
    *,
    load_weights: bool,
    architecture: Architecture | None = None,
    weights_on_host: bool = False,
    mixes_dtypes: bool = True,
) -> PreTrainedModel:
    """Return the model of an engine with its adapter and frozen parameters, on its device.

    Args:
        shard: None keeps the model whole.
        load_weights: False leaves the weights undefined.
        architecture: replaces transformers' own class; needs a `shard`.
        mixes_dtypes: `shard` accepts frozen weights of another dtype than trained ones.
        weights_on_host: `shard` needs weights in host memory; buffers go to the device.

    Raises:
        ConfigError: the directory does not hold such a model, or a pattern or adapter target
            matches nothing in it.
    """
    device, hf_dir = spec.platform.device(), spec.hf_dir
    model = (
        build_on_meta(hf_dir, spec.model_type, architecture)
        if shard is not None or not load_weights
        else None
    )
    disk_names = disk_names_of(model, hf_dir) if model is not None and load_weights else None
    is_filled = load_weights and disk_names is None
    if is_filled and architecture is not None:
        raise ConfigError(
            "model.path",
            f"{hf_dir} is a {type(model).__name__}, whose weights have another form on disk than "
            f"in memory, which {spec.training.backend} cannot load; use fsdp2",
        )
    if model is None or is_filled:
        model = _from_pretrained(hf_dir, spec.model_type)
    elif load_weights:
        check_stored_names(hf_dir, spec.model_type)
    _prepare(model, spec)
    _hold_frozen(model, spec, mixes_dtypes=mixes_dtypes)
    if shard is not None:
        shard(model)
    if not is_filled:
        _materialize(model, torch.device("cpu") if weights_on_host else device)
    elif not weights_on_host:
        nn.Module.to(model, device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if disk_names is not None:
        load_slices(model, hf_dir, disk_names)
    if spec.training.lora is not None and spec.optimizer is not None:
        initialize_adapter(dict(model.named_parameters()), spec.seed)
    return model


def build_on_meta(
    hf_dir: Path, model_type: ModelType, architecture: Architecture | None = None
) -> PreTrainedModel:
    """Return the architecture on the meta device."""
    config = _config(hf_dir, model_type)
    if architecture is None:
        architecture = partial(
            _auto_class(model_type, config, hf_dir).from_config,
            dtype=torch.float32,
            attn_implementation=attention_names(config),
        )
    with torch.device("meta"):
        return _checked(architecture(config), hf_dir)


def check_stored_names(hf_dir: Path, model_type: ModelType) -> None:
    """Refuse a model directory with weights that the model would ignore; reads headers only.

    Raises:
        ConfigError: names some of them.
    """
    stored = set(stored_tensor_names(hf_dir))
    unexpected = unexpected_names(build_on_meta(hf_dir, model_type), stored)
    _refuse_misfits(hf_dir, {"unexpected": _new_to_both(unexpected, hf_dir, model_type)})


def unexpected_names(model: PreTrainedModel, stored: Set[str]) -> set[str]:
    """Return the stored names that `from_pretrained` would report as unexpected."""
    held = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    # The two fields that the method reads; the others differ between releases.
    info: Any = SimpleNamespace(
        missing_keys=set(),
        unexpected_keys=set(stored - revert_weight_conversion(model, held).keys()),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info.unexpected_keys


def disk_names_of(model: PreTrainedModel, hf_dir: Path) -> dict[str, str] | None:
    """Map names in memory to names on disk; None if files differ by more than names.

    The head of a value model is included only if it is on disk.
    """
    stored = set(stored_tensor_names(hf_dir))
    held = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in named_state(model)
    }
    names = {id(tensor): name for name, tensor in held.items()}
    # A tensor that is only renamed is returned as the same object.
    found = {
        names.get(id(tensor)): on_disk
        for on_disk, tensor in revert_weight_conversion(model, dict(held)).items()
    }
    if found.keys() != held.keys():
        return None
    renamed = {
        name: on_disk
        for name, on_disk in found.items()
        if name is not None and (on_disk in stored or not name.startswith(VALUE_HEAD))
    }
    return renamed if set(renamed.values()) <= stored else None


def load_slices(model: PreTrainedModel, hf_dir: Path, disk_names: Mapping[str, str]) -> None:
    """Fill this rank's part of a model; a value head that is not in `disk_names` becomes 0.

    Raises:
        ConfigError: the directory holds no such weights.
    """
    wanted: dict[str, Tensor] = {}
    for name, tensor in named_state(model):
        if base_name(name) in disk_names:
            wanted[disk_names[base_name(name)]] = tensor
        elif name.startswith(VALUE_HEAD):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.detach().zero_()
    load_hub_weights(hf_dir, wanted)


def load_hub_weights(hf_dir: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, sharded or not and named as on the hub, from a model directory.

    Raises:
        ConfigError: the directory holds no such weights.
    """
    try:
        load_sharded(hf_dir, tensors)
    except CheckpointError as error:
        raise ConfigError("model.path", f"does not fit its own config: {error}") from error


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping activations."""
    # transformers' own checkpointing needs training mode, which enables dropout.
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            recompute(layer)


def recompute(layer: nn.Module) -> None:
    """Recompute one layer; the memory audit counts what the recomputation keeps."""
    layer.forward = partial(
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False,
        context_fn=recomputation_contexts,
    )  # fmt: skip


def decoder_layers(model: PreTrainedModel, inside: str = "") -> list[nn.Module]:
    """Return the layers (of a vision tower too) that the architecture declares not to be split.

    `inside` is a prefix of their names.
    """
    wanted = set(model._no_split_modules or ())
    layers = ((name, m) for name, m in model.named_modules() if type(m).__name__ in wanted)
    return [layer for name, layer in layers if name.startswith(inside)]


def compile_layers(layers: Iterable[nn.Module], backend: str) -> None:
    """Compile layers for packed rows of any length; all layers of a model share one graph.

    Recomputation has to wrap the compiled layer: traced into it, it would prevent compilation.
    A vision tower's layers would compile a graph for each number of images.
    """
    torch._dynamo.config.recompile_limit = NUM_VARIANTS
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)


def _prepare(model: PreTrainedModel, spec: EngineSpec) -> None:
    """Add kernels and adapter, and disable gradients of parameters that are not trained."""
    training = spec.training
    if training.use_liger:
        use_kernels(model, liger_kernels(spec.platform.device()))
    inside = language_model_prefix(model)
    if training.compiles_layers:
        compile_layers(decoder_layers(model, inside), training.torch_compile_backend)
    if spec.optimizer is None:
        # No adapter without an optimizer: it is merged when a checkpoint is loaded.
        model.requires_grad_(False)
        return
    if training.lora is not None:
        add_adapter(model, training.lora, inside=inside)
    for pattern in training.frozen_parameters:
        frozen = [p for name, p in model.named_parameters() if fnmatch(base_name(name), pattern)]
        if not frozen:
            raise ConfigError("training.frozen_parameters", f"{pattern!r} fits no parameter")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("training.frozen_parameters", "nothing is left to train; remove some")


def _hold_frozen(model: PreTrainedModel, spec: EngineSpec, *, mixes_dtypes: bool) -> None:
    """Convert frozen weights to the compute dtype, where no master weights are needed."""
    computes_in = getattr(torch, spec.training.dtype)
    is_held = spec.optimizer is None or (mixes_dtypes and spec.training.lora is not None)
    for parameter in model.parameters() if is_held and spec.platform.is_accelerator else ():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(computes_in)


def _auto_class(model_type: ModelType, config: PretrainedConfig, hf_dir: Path) -> Any:
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


def _from_pretrained(hf_dir: Path, model_type: ModelType) -> PreTrainedModel:
    config = _config(hf_dir, model_type)
    with without_progress_bars():
        model, info = _auto_class(model_type, config, hf_dir).from_pretrained(
            hf_dir,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention_names(config),
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = set(info["missing_keys"])
    if model_type == "value_model":
        missing = {name for name in missing if not name.startswith(VALUE_HEAD)}
    _refuse_misfits(
        hf_dir,
        {
            "missing": missing,
            "mismatched": info["mismatched_keys"],
            "unexpected": _new_to_both(info["unexpected_keys"], hf_dir, model_type),
        },
    )
    for name, parameter in model.named_parameters():
        if name in info["missing_keys"]:
            nn.init.zeros_(parameter)
    return _checked(model, hf_dir)


def _new_to_both(unexpected: Set[str], hf_dir: Path, model_type: ModelType) -> Set[str]:
    """Return the names unexpected by the language model too: a value model lacks its head."""
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


def _checked(model: PreTrainedModel, hf_dir: Path) -> PreTrainedModel:
    # A model with its own attention would let packed sequences see each other.
    _refuse(attention_refusal(type(model)) or position_refusal(model), hf_dir)
    # Permanent: training mode has dropout, dropped layers and router noise.
    return model.eval()


def _config(hf_dir: Path, model_type: ModelType) -> PretrainedConfig:
    register_packed_attention()
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False)
    config.use_cache = False
    if model_type == "value_model":
        config.num_labels = 1
    check_packed(hf_dir, text_settings(config))
    return config


def _materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate a meta-device model; weights stay undefined, buffers are computed."""
    model.to_empty(device=device)
    model.tie_weights()
    persistent = set(model.state_dict(keep_vars=True))
    computed = {name.rpartition(".")[0] for name, _ in model.named_buffers()
                if name not in persistent}  # fmt: skip
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in computed:
                model._init_weights(module)
