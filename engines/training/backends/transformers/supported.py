"""Which models can train on packed sequences, without torch.

The plan checks this, and every rank again. Others may still be refused when they are built.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.attention_needs import unusual_attention
from infra.errors import ConfigError


def check_model(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a text model whose attention `rl_varlen` does not compute.

    Raises:
        ConfigError: names the unsupported feature.
    """
    lacking = unusual_attention(config)
    if lacking is not None:
        raise ConfigError(
            "model.path",
            f"got {hf_dir}, a {config.get('model_type')} model with {lacking}; need attention that "
            "packed sequences can train with; choose another architecture",
        )
