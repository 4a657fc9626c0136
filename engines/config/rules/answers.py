"""Rules of the form of answers."""

from engines.config.plugins import ROLLOUT_ENGINES, structured_output_engines
from engines.config.rollout import RolloutConfig, StructuredOutputConfig
from infra.errors import ConfigError


def check_structured_output(
    path: str, form: StructuredOutputConfig | None, rollout: RolloutConfig
) -> None:
    """Refuse a form of answers that the rollout engine cannot keep.

    Args:
        path: the setting of the form.
        form: of the answers; None: any.
        rollout: names the engine.

    Raises:
        ConfigError: names `path`, and the engines that can.
    """
    if form is None or ROLLOUT_ENGINES.place(rollout.engine).structured_output:
        return
    able = " or ".join(structured_output_engines())
    raise ConfigError(
        path,
        f"got a form with rollout.engine {rollout.engine}, which cannot keep answers to one; need "
        f"null; set it to null, or rollout.engine to {able}",
    )
