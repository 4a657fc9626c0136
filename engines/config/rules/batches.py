"""Rules of sizes, orders and weight averages.

Sizes are what must fit into a context, and what must divide among ranks.
"""

from engines.config.backends import BACKENDS, backends_with
from engines.config.data import OrderConfig
from engines.config.sections import RLConfig, SupervisedConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from infra.errors import ConfigError, refuse


def check_answer_length(
    path: str, max_new_tokens: int, max_length: int, max_prompt_length: int | None = None
) -> None:
    """Refuse answers that do not fit into the context after a prompt.

    Raises `ConfigError` at `path`. `max_prompt_length` None means unknown: at least one token.
    """
    num_prompt = max_prompt_length or 1
    total, room = num_prompt + max_new_tokens, max_length - num_prompt
    if max_new_tokens <= room:
        return
    refuse(
        max_prompt_length is None,
        path,
        f"got {max_new_tokens}; need less than model.max_length {max_length}, which an "
        "answer shares with its prompt; lower it",
    )
    remedy = f"lower it to {room}"
    if room <= 0:
        rest = max_length - max_new_tokens
        remedy = f"lower data.max_prompt_length to {rest}" if rest > 0 else "lower both"
    raise ConfigError(
        path,
        f"{max_prompt_length} (data.max_prompt_length) + {max_new_tokens} = {total} tokens "
        f"exceeds model.max_length {max_length}; {remedy}",
    )


def check_divides(path: str, size: int, training: TrainingConfig) -> None:
    """Refuse a batch not divisible by the data-parallel ranks; raises `ConfigError` at `path`."""
    ranks = training.data_parallel_size
    if size % ranks:
        below, above = size // ranks * ranks, -(-size // ranks) * ranks
        use = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            path, f"{size} is not a multiple of the {ranks} data-parallel ranks; use {use}"
        )


def check_average(path: str, optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    """Refuse an average that a built-in backend cannot keep; raises `ConfigError`."""
    able = backends_with("ema")
    refuse(
        optimizer.ema and training.backend in BACKENDS and training.backend not in able,
        f"{path}.ema",
        f"got one; {training.backend} keeps no average of its weights; need null; remove it, "
        f"or set training.backend to {' or '.join(able)}",
    )


def check_order(path: str, order: OrderConfig) -> None:
    """Refuse settings that the order's kind ignores, or needs and lacks; raises `ConfigError`."""
    shuffled, banded = order.kind == "shuffled", order.kind == "banded"
    steps = [band.first_step for band in order.bands]
    limits = [band.max_difficulty for band in order.bands]
    # Only the last band may have a null limit.
    known = [limit for limit in limits if limit is not None]
    rising = steps == sorted(set(steps)) and known == sorted(set(known))
    for is_refused, setting, problem in (
        (
            order.weights and not shuffled,
            "weights",
            f"got weights with kind {order.kind}; need kind shuffled; set it, or remove them",
        ),
        (
            order.difficulty is not None and shuffled,
            "difficulty",
            f"got {order.difficulty} with kind shuffled, which reads none; need null; remove it, "
            f"or set {path}.kind to ascending or banded",
        ),
        (
            bool(order.bands) != banded,
            "bands",
            f"got {len(order.bands)} with kind {order.kind}; need "
            f"{'at least 1' if banded else 'none'}; change one of the two",
        ),
        (
            banded and (steps[:1] != [0] or not rising or None in limits[:-1]),
            "bands",
            f"got first_step {steps} and max_difficulty {limits}; need both to rise, first_step "
            "from 0, and null in the last band alone; put them in order",
        ),
    ):
        refuse(is_refused, f"{path}.{setting}", problem)


def check_rl_order(rl: RLConfig) -> None:
    """Refuse a prompt order that dynamic sampling would break; raises `ConfigError`."""
    check_order("rl.order", rl.order)
    groups = rl.algorithm.filter_groups
    refuse(
        rl.order.kind == "ascending" and groups.enable and groups.max_num_gen_batches > 1,
        "rl.order.kind",
        "got ascending with rl.algorithm.filter_groups.enable, whose further batches would be "
        "of other difficulty than the step's; need shuffled or banded; set it, or "
        "max_num_gen_batches to 1",
    )


def check_supervised_order(path: str, order: OrderConfig) -> None:
    """Refuse an order by a column that supervised rows lack; raises `ConfigError`."""
    check_order(path, order)
    refuse(
        order.difficulty is not None,
        f"{path}.difficulty",
        f"got {order.difficulty}; need null: rows with answers have no extra_info, so their "
        "difficulty is their number of tokens; remove it",
    )


def check_supervised(
    section: str, config: SupervisedConfig, batch_size: str, training: TrainingConfig
) -> None:
    """Refuse an order, a batch (its field is `batch_size`) or an average that does not fit."""
    check_supervised_order(f"{section}.order", config.order)
    check_divides(f"{section}.{batch_size}", getattr(config, batch_size), training)
    check_average(f"{section}.optimizer", config.optimizer, training)
