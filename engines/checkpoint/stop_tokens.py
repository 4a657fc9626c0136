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
    if eos is None:
        return frozenset()
    if isinstance(eos, int):
        return frozenset([eos])
    if all(isinstance(token, int) for token in eos):
        return frozenset(eos)
    raise RolloutError(f"{hf_dir}: eos_token_id {eos!r} is no list of token ids")
