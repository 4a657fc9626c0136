"""Rules for the order in which rows are trained on."""

from engines.config.data import OrderConfig
from engines.config.sections import RLConfig
from infra.errors import ConfigError


def check_order(path: str, order: OrderConfig) -> None:
    """Refuse settings that the order's kind ignores or lacks; raises `ConfigError`."""
    shuffled, banded = order.kind == "shuffled", order.kind == "banded"
    if order.weights and not shuffled:
        raise ConfigError(
            f"{path}.weights", f"got weights with kind {order.kind}; need kind shuffled; set one"
        )
    if order.difficulty is not None and shuffled:
        raise ConfigError(
            f"{path}.difficulty",
            f"got {order.difficulty} with kind shuffled, which reads none; need null; remove it, "
            f"or set {path}.kind to ascending or banded",
        )
    if bool(order.bands) != banded:
        raise ConfigError(
            f"{path}.bands",
            f"got {len(order.bands)} with kind {order.kind}; need "
            f"{'at least 1' if banded else 'none'}; change one of the two",
        )
    steps = [band.first_step for band in order.bands]
    limits = [band.max_difficulty for band in order.bands]
    # Only the last band may have a null limit.
    known = [limit for limit in limits if limit is not None]
    rising = steps == sorted(set(steps)) and known == sorted(set(known))
    if banded and (steps[0] != 0 or not rising or None in limits[:-1]):
        raise ConfigError(
            f"{path}.bands",
            f"got first_step {steps} and max_difficulty {limits}; need both to rise, first_step "
            "from 0, and null in the last band alone; put them in order",
        )


def check_rl_order(rl: RLConfig) -> None:
    """Refuse a prompt order that dynamic sampling would break; raises `ConfigError`."""
    check_order("rl.order", rl.order)
    groups = rl.algorithm.filter_groups
    if rl.order.kind == "ascending" and groups.enable and groups.max_num_gen_batches > 1:
        raise ConfigError(
            "rl.order.kind",
            "got ascending with rl.algorithm.filter_groups.enable, whose further batches would be "
            "of other difficulty than the step's; need shuffled or banded; set it, or "
            "max_num_gen_batches to 1",
        )


def check_supervised_order(path: str, order: OrderConfig) -> None:
    """Refuse an order by a column that supervised rows lack; raises `ConfigError`."""
    check_order(path, order)
    if order.difficulty is not None:
        raise ConfigError(
            f"{path}.difficulty",
            f"got {order.difficulty}; need null, for rows with answers have no extra_info: the "
            "tokens of a conversation say how difficult it is; remove it",
        )
