"""Rules of the form of answers."""

from engines.config.plugins import ROLLOUT_ENGINES, structured_output_engines
from engines.config.rollout import RolloutConfig, StructuredOutputConfig
from infra.errors import ConfigError


def check_structured_output(
    path: str, form: StructuredOutputConfig | None, rollout: RolloutConfig
) -> None:
    """Refuse a form of answers that the rollout engine cannot keep.

    Args:
        form: of the answers; None: any.

    Raises:
        ConfigError: names `path`, and the engines that can.
    """
    if form is None or ROLLOUT_ENGINES.place(rollout.engine).structured_output:
        return
    able = " or ".join(structured_output_engines())
    raise ConfigError(
        path,
        f"rollout.engine {rollout.engine} does not support structured output; set this to null, or "
        f"rollout.engine to {able}",
    )
