"""Make TorchTitan run on a CPU: on its own, it takes the device from the build of torch.

Only `device_type` and `device_module` are replaced; the end of the scope restores the modules that
were imported before it. A module first imported inside the scope keeps the CPU.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hardware.replaced import replaced


@contextmanager
def torchtitan_on_cpu() -> Iterator[None]:
    """Scope in which TorchTitan's device is the CPU, also in modules imported before."""
    import torch

    stand_ins = {"device_type": "cpu", "device_module": torch.cpu}
    importlib.import_module("torchtitan.tools.utils")
    modules = [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]
    with ExitStack() as stack:
        for module in modules:
            held = {name: stand_ins[name] for name in vars(module).keys() & stand_ins}
            stack.enter_context(replaced(module, held))
        yield
