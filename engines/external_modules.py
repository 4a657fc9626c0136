"""Modules of other people that register plugins when they are imported. No torch."""

import importlib

from infra import env
from infra.errors import ConfigError


def import_external_modules() -> tuple[str, ...]:
    """Import what RLHF_USE_EXTERNAL_MODULES names, in its order.

    Every process that looks up plugins calls this first: a job, and each rank of its group.

    Returns:
        The names.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    listed = env.RLHF_USE_EXTERNAL_MODULES.get() or ""
    names = tuple(name.strip() for name in listed.split(",") if name.strip())
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"environment.{env.RLHF_USE_EXTERNAL_MODULES.name}",
                f"{name} cannot be imported ({error}); install it, or remove it from the list",
            ) from error
    return names
