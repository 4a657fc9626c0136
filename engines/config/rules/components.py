"""The components of a score that an estimator compares, and the weight of each.

Promises: they follow from the recipe alone, so that a step's samples cannot change the objective;
a penalty of a mixture stays one. Does not promise that a reward gives them: of a mixture that is
known, of any other function its first samples say it.
"""

from collections.abc import Mapping, Sequence

from engines.algorithms.options import GdpoOptions
from engines.config.algorithm import AlgorithmConfig, RewardConfig
from engines.config.options import own_options
from engines.config.rows.algorithm import ADVANTAGES
from engines.config.sections import RLConfig
from infra.errors import ConfigError

GDPO = "gdpo"
KEYS = "rl.algorithm.options.gdpo_reward_keys"
_OF_ANY_MIXTURE = ("score", "acc")


def resolved_algorithm(rl: RLConfig) -> AlgorithmConfig:
    """The algorithm with the components that it compares, and their weights, written out.

    Args:
        rl: of a recipe or a round.

    Returns:
        The same algorithm where the estimator compares none.

    Raises:
        ConfigError: the recipe leaves open what is compared, or names what a route does not give.
    """
    algorithm, reward = rl.algorithm, rl.reward
    if algorithm.adv_estimator != GDPO:
        return algorithm
    given = _options(algorithm)
    keys = given.gdpo_reward_keys or _all_of(reward)
    _check_given(keys, reward)
    parts = reward.components
    own = tuple(parts[key].weight if key in parts else 1.0 for key in keys)
    weights = own if given.gdpo_reward_weights is None else given.gdpo_reward_weights
    written = {"gdpo_reward_keys": keys, "gdpo_reward_weights": weights}
    return algorithm.model_copy(update={"options": {**algorithm.options, **written}})


def compared_components(algorithm: AlgorithmConfig) -> Sequence[str]:
    """What every sample has to have for the estimator; nothing for one that compares none.

    Args:
        algorithm: as `resolved_algorithm` made it.

    Returns:
        Names, perhaps with that of the score.
    """
    return _options(algorithm).gdpo_reward_keys or () if algorithm.adv_estimator == GDPO else ()


def _options(algorithm: AlgorithmConfig) -> GdpoOptions:
    options = own_options(algorithm.options, ADVANTAGES.find(GDPO), "rl.algorithm.options")
    assert isinstance(options, GdpoOptions)  # noqa: S101 - the schema of that row
    return options


def _routes(reward: RewardConfig) -> Mapping[str, Sequence[str]]:
    """Components by `data_source`; none where the reward is no mixture."""
    return reward.routes or ({"*": tuple(reward.components)} if reward.components else {})


def _all_of(reward: RewardConfig) -> tuple[str, ...]:
    """Every component of a mixture, sorted: another order would round sums differently."""
    found = {tuple(sorted(names)) for names in _routes(reward).values()}
    if len(found) == 1:
        return found.pop()
    got = f"null with rl.reward.function {reward.function}, which may report any"
    if found:
        got = f"null, and routes of different components ({', '.join(reward.routes)})"
    raise ConfigError(KEYS, f"got {got}; need names of what every sample has; set it")


def _check_given(keys: Sequence[str], reward: RewardConfig) -> None:
    for source, names in _routes(reward).items():
        able = (*names, *_OF_ANY_MIXTURE)
        for key in keys:
            if key not in able:
                raise ConfigError(
                    KEYS,
                    f"got {key!r}, which does not judge data_source {source!r}; need one of "
                    f"{', '.join(able)}; name one, or add it to the route",
                )
