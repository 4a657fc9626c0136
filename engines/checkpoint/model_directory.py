"""Find, check and create Hugging Face model directories.

Promises: a directory that passes `check_model_directory` has a config, a tokenizer and unquantized
safetensors files of their full size, needs no code of its own and states no smaller context than
requested. The check reads only JSON and file headers. A random model is bitwise reproducible.
Does not promise: that transformers knows the architecture, or that weights are finite.
Torch and transformers are imported inside functions, so that a bad path fails without that delay.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.config.model import ArchitectureConfig, ModelConfig, NamedModelConfig
from infra.errors import ConfigError
from infra.identity.hub import hub_snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = ("max_position_embeddings", "n_positions")
_FIELD = "model.path"
_INDEX = "model.safetensors.index.json"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of `config.json` that describe quantized weights."""
_CODES = ("F8_", "F6_", "F4")
"""Prefixes of the safetensors names of floating types of one byte or less."""
_UNQUANTIZED = "give the unquantized weights of this model"
_SCORE_HEAD = "score.weight"
"""Name of the head's weight in transformers' sequence classification models."""
_MAX_HEADER_BYTES = 100_000_000


def create_random_model(
    architecture: ArchitectureConfig, tokenizer_dir: Path, max_length: int, seed: int, out_dir: Path
) -> None:
    """Write a float32 model with random weights, its tokenizer and its generation config.

    The weights are drawn from `seed`; global generators keep their state. Files in `out_dir` are
    replaced. Raises `ConfigError` if transformers has no causal LM of that type.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = load_tokenizer(tokenizer_dir)
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    try:
        config = AutoConfig.for_model(
            architecture.model_type,
            vocab_size=len(tokenizer),
            hidden_size=architecture.hidden_size,
            num_hidden_layers=architecture.num_layers,
            num_attention_heads=architecture.num_heads,
            num_key_value_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            intermediate_size=architecture.intermediate_size,
            tie_word_embeddings=architecture.tie_word_embeddings,
            rope_theta=architecture.rope_theta,
            max_position_embeddings=max_length,
            **special,
        )
        config.dtype = torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(
            "model.architecture", f"got model_type {architecture.model_type!r}; {error}"
        ) from error
    model.generation_config = GenerationConfig(**special)
    out_dir.mkdir(parents=True, exist_ok=True)
    with without_progress_bars():
        model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def load_tokenizer(path: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer, with its own chat template or the given Jinja text.

    Raises:
        ConfigError: there is no tokenizer that transformers can load without running its code.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(_FIELD, f"no usable tokenizer in {path}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def resolve_model(model: ModelConfig | NamedModelConfig, max_length: int | None) -> Path:
    """Return the checked local directory of a pretrained model; download it if `path` is a hub id.

    Only safetensors, JSON and tokenizer files are fetched. Raises `ConfigError` if there is no such
    model, or `check_model_directory` refuses it.
    """
    if model.path is None:
        raise ConfigError(_FIELD, "missing; give a directory or a hub id")
    path = Path(model.path).expanduser()
    if not path.exists():
        path = hub_snapshot(model.path, "model", model.revision, "model", _HUB_PATTERNS)
    check_model_directory(path, max_length=max_length)
    return path


def check_model_directory(path: Path, *, max_length: int | None = None) -> None:
    """Raise `ConfigError` for a directory that cannot be trained from; imports no torch.

    `max_length` is the required context in tokens; None does not check it.
    """
    if not path.is_dir():
        raise ConfigError(
            _FIELD, f"{path} is no directory (cwd is {Path.cwd()}); need a model directory"
        )
    config = _read_config(path)
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", read_json(path / "tokenizer_config.json")),
    ):
        if "auto_map" in content:
            raise ConfigError(
                _FIELD,
                f"{path}/{name} asks for code of its own (auto_map); refused; use a model "
                "whose architecture transformers has",
            )
    _check_context(path, config, max_length)
    _check_unquantized(path, config)
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise ConfigError(
            _FIELD, f"{path} has no tokenizer; copy tokenizer.json beside the weights"
        )


def check_finite(path: Path) -> None:
    """Raise `ConfigError` at the first tensor with NaN or infinite values; loads one at a time."""
    import torch
    from safetensors import safe_open

    for file in _weight_files(path):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  it is no mapping
                num_spoiled = int(torch.isfinite(stored.get_tensor(name)).logical_not().sum())
                if num_spoiled:
                    raise ConfigError(
                        _FIELD,
                        f"{path}: {name} holds {num_spoiled} non-finite values; need finite ones; "
                        "copy the model again, or take an earlier checkpoint of it",
                    )


def num_parameters(path: Path) -> int:
    """Return the number of elements in the weights of a model directory."""
    headers = map(_header, _weight_files(path))
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def check_reward_model(path: Path, *, max_length: int | None) -> None:
    """Raise `ConfigError` unless the directory holds a model with a single-output score head."""
    check_model_directory(path, max_length=max_length)
    entries = {name: value for f in _weight_files(path) for name, value in _header(f).items()}
    shape = entries.get(_SCORE_HEAD, {}).get("shape")
    if shape is None or shape[0] != 1:
        held = f"no {_SCORE_HEAD}" if shape is None else f"{_SCORE_HEAD} of shape {shape}"
        raise ConfigError(
            _FIELD,
            f"{path} holds {held}; need a head of one output; give a sequence classification "
            "model with num_labels 1",
        )


VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Supported vision-language architectures: images are a grid of patches that positions follow."""


def vision_model_type(path: Path) -> str | None:
    """Return the model type of a vision-language model's directory; None for a text model."""
    config = read_json(path / "config.json")
    return str(config.get("model_type")) if config.get("vision_config") else None


def stored_tensor_names(path: Path) -> list[str]:
    """Return the sorted names of the tensors in a model directory's safetensors files."""
    return sorted(name for file in _weight_files(path) for name in _header(file))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn off transformers' progress bars within the context, to keep them out of job logs."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        names = sorted(entry.name for entry in path.iterdir())
        held = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        inside = sorted(path.glob("*/hf/config.json")) or sorted(path.glob("*/config.json"))
        hint = f" (a run? pass {inside[-1].parent})" if inside else ""
        raise ConfigError(
            _FIELD,
            f"{path} is not a model directory: no config.json; it holds: {held or 'nothing'}{hint}",
        )
    return read_json(path / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model directory; empty if the file is absent."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(_FIELD, f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(_FIELD, f"{path} holds a {type(content).__name__}; need an object")
    return content


def stated_context(path: Path) -> int | None:
    """Return the smaller of context and `rotary_limit`, in tokens; None if there is neither."""
    config = _read_config(path)
    limits = (_built_for(config), rotary_limit(_text_config(config)))
    return min((limit for limit in limits if limit is not None), default=None)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and nested else config


def _built_for(config: Mapping[str, Any]) -> int | None:
    places = (config, _text_config(config))
    found = next((place[name] for place in places for name in _CONTEXT if name in place), None)
    return found if isinstance(found, int) else None


def _check_context(path: Path, config: dict[str, Any], max_length: int | None) -> None:
    context, limit = _built_for(config), rotary_limit(_text_config(config))
    if max_length is not None and context is not None and max_length > context:
        raise ConfigError(
            "model.max_length",
            f"got {max_length}; need at most {context}, the context of {path}; lower it",
        )
    if max_length is not None and limit is not None and max_length > limit:
        raise ConfigError(
            _FIELD,
            f"{path} has rotary embeddings that change for all sequences of a batch when one has "
            f"more than {limit} tokens; got model.max_length {max_length}; set it to {limit} or "
            "less",
        )


def _check_unquantized(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse quantized weights: their codes would be read as weights without the scales."""
    for section in (config, _text_config(config)):
        for name in QUANTIZATION:
            if found := section.get(name):
                method = found.get("quant_method", name) if isinstance(found, dict) else name
                raise ConfigError(
                    _FIELD,
                    f"{path} holds quantized weights ({method}); need float32, bfloat16 or "
                    f"float16; {_UNQUANTIZED}",
                )
    for file in _weight_files(path):
        for name, entry in _header(file).items():
            if entry["dtype"].startswith(_CODES):
                raise ConfigError(
                    _FIELD,
                    f"{path}: {name} is {entry['dtype']}; need float32, bfloat16 or float16; "
                    f"{_UNQUANTIZED}",
                )


def rotary_limit(config: Mapping[str, Any]) -> int | None:
    """Return the sequence length in tokens up to which rotary angles do not depend on the batch.

    LongRoPE (arXiv:2402.13753) changes its factors, and dynamic NTK scaling its base, for all
    sequences when the longest one exceeds the limit. None if the angles never change.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limits: list[int | None] = []
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = part.get("rope_type", part.get("type"))
        if kind in ("longrope", "su"):
            name = "original_max_position_embeddings"
            limits.append(config.get(name, part.get(name)))
        elif kind == "dynamic":
            limits.append(config.get("max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


def _weight_files(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        weight_map = read_json(path / _INDEX).get("weight_map", {})
        shards = [path / name for name in sorted(set(weight_map.values()))]
        for shard in shards:
            if shard.resolve().parent != path.resolve() and not shard.is_symlink():
                raise ConfigError(_FIELD, f"{path / _INDEX} names {shard.name} outside of {path}")
            if not shard.exists():
                raise ConfigError(
                    _FIELD, f"{path / _INDEX} names {shard.name}, which is absent; copy it there"
                )
        if shards:
            return shards
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ConfigError(
            _FIELD,
            f"{path} holds only {', '.join(pickles)} (pickle can run code); refused; convert it to "
            "safetensors with save_pretrained on a machine you can lose",
        )
    raise ConfigError(_FIELD, f"{path} holds no weights; need model.safetensors")


def _header(path: Path) -> dict[str, Any]:
    """Return the entries of a safetensors header; check the stated size against the file's."""
    with path.open("rb") as file:
        prefix = file.read(8)
        (header_bytes,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ConfigError(_FIELD, f"{path} is not a safetensors file; copy it again")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise ConfigError(_FIELD, f"{path}: damaged header ({error}); copy it again") from error
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    promised, actual = 8 + header_bytes + max(ends, default=0), path.stat().st_size
    if promised != actual:
        raise ConfigError(
            _FIELD, f"{path}: header says {promised} bytes, file has {actual}; copy it again"
        )
    return header
