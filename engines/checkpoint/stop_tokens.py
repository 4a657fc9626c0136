"""The tokens that end a sample, the same for every rollout engine."""

from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from engines.errors import RolloutError


def eos_token_ids(hf_dir: Path, config: PretrainedConfig) -> frozenset[int]:
    """Return the ids that `generate` stops at: from generation_config.json, else config.json."""
    source: GenerationConfig | PretrainedConfig = config
    if (hf_dir / "generation_config.json").is_file():
        source = GenerationConfig.from_pretrained(hf_dir, local_files_only=True)
    eos = source.eos_token_id
    tokens = [eos] if isinstance(eos, int) else eos or []
    if not all(isinstance(token, int) for token in tokens):
        raise RolloutError(f"{hf_dir}: eos_token_id {eos!r} is no list of token ids")
    return frozenset(tokens)
