"""Which models train on packed sequences. No torch: the plan asks, and every rank again.

Promises: a model that is refused here would be refused, or computed wrongly, once it is built.
Does not promise that every other one trains: its class may have an attention that cannot be
replaced (`engines.architecture`), or ask it for what only the first forward pass shows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.attention_needs import unusual_attention
from infra.errors import ConfigError


def check_model(hf_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model whose attention `rl_varlen` does not compute.

    Args:
        hf_dir: of the model, for the error line.
        config: of the text model in it, as in `config.json`.

    Raises:
        ConfigError: names what of its attention is lacking.
    """
    lacking = unusual_attention(config)
    if lacking is not None:
        raise ConfigError(
            "model.path",
            f"got {hf_dir}, a {config.get('model_type')} model with {lacking}; need attention that "
            "packed sequences can train with; choose another architecture",
        )
