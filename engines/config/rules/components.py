"""The score components that an estimator compares, and their weights.

Promises: they follow from the recipe alone, so a step's samples cannot change the objective. Does
not promise that a reward reports them: only for mixtures is that known in advance.
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
    """Return the algorithm with compared components and weights written out, if it compares any.

    Raises:
        ConfigError: the components are ambiguous, or a route does not report one of them.
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
    """Return the components every sample needs, from a resolved algorithm; may be empty."""
    return _options(algorithm).gdpo_reward_keys or () if algorithm.adv_estimator == GDPO else ()


def _options(algorithm: AlgorithmConfig) -> GdpoOptions:
    options = own_options(algorithm.options, ADVANTAGES.find(GDPO), "rl.algorithm.options")
    assert isinstance(options, GdpoOptions)  # noqa: S101 - the schema of that row
    return options


def _routes(reward: RewardConfig) -> Mapping[str, Sequence[str]]:
    return reward.routes or ({"*": tuple(reward.components)} if reward.components else {})


def _all_of(reward: RewardConfig) -> tuple[str, ...]:
    """Return all components, sorted because the order changes the rounding of sums."""
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
