"""TorchTitan on the CPU, which it does not support: it takes its device from the torch build.

Promises: nothing else of TorchTitan is replaced, and leaving the scope restores everything.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def torchtitan_on_cpu() -> Iterator[None]:
    """Scope in which TorchTitan's device is the CPU.

    Modules of TorchTitan copy the device name at import, so imported ones are changed too.
    """
    import torch

    stand_ins: dict[str, Any] = {"device_type": "cpu", "device_module": torch.cpu}
    importlib.import_module("torchtitan.tools.utils")
    replaced: list[tuple[ModuleType, str, Any]] = []
    modules = [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]
    for module in modules:
        for name in vars(module).keys() & stand_ins:
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
