"""The rule for structured output."""

from engines.config.plugins import ROLLOUT_ENGINES, structured_output_engines
from engines.config.rollout import RolloutConfig, StructuredOutputConfig
from infra.errors import ConfigError


def check_structured_output(
    path: str, form: StructuredOutputConfig | None, rollout: RolloutConfig
) -> None:
    """Refuse a form that the rollout engine cannot enforce; raises `ConfigError` at `path`."""
    if form is None or ROLLOUT_ENGINES.place(rollout.engine).structured_output:
        return
    able = " or ".join(structured_output_engines())
    raise ConfigError(
        path,
        f"rollout.engine {rollout.engine} does not support structured output; set this to null, or "
        f"rollout.engine to {able}",
    )
