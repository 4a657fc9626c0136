"""Rules among the settings of an RL round that hold whatever the data and the model are.

One place for both who asks early, the control plane, and who asks last, the job.
"""

from engines.config.stages import RLConfig, RLRoundStageConfig
from infra.errors import ConfigError


def check_rl_settings(config: RLConfig | RLRoundStageConfig) -> None:
    """Refuse what would only fail, or quietly mislead, once the models are loaded.

    Args:
        config: of a round, or of the rounds of a recipe.

    Raises:
        ConfigError: names the field.
    """
    sampling = config.sampling
    if sampling.temperature == 0:
        raise ConfigError(
            "rl.sampling.temperature", "got 0; need > 0: greedy samples of a prompt are all equal"
        )
    if config.optimizer.schedule != "constant":
        raise ConfigError(
            "rl.optimizer.schedule",
            f"got {config.optimizer.schedule!r}; need 'constant', for the number of rounds is open",
        )
    if config.mismatch.enable and (sampling.top_p < 1 or sampling.top_k):
        raise ConfigError(
            "rl.mismatch.enable",
            f"got true with top_p {sampling.top_p} and top_k {sampling.top_k}; need top_p 1 and "
            "top_k 0, else the sampler's distribution is not the trainer's by construction; set "
            "it to false",
        )
