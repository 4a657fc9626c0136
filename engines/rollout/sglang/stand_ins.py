"""Stand-ins for packages that SGLang imports on every platform and never calls on a CPU.

SGLang 0.5.23 imports `sgl_kernel`, which has only CUDA builds, and `torchvision`, whose build needs
CUDA's libraries too. `install` makes both importable in SGLang's processes.
Promises: calling or creating anything in them raises NotImplementedError with its full name; an
installed package is left alone.
Does not cover kernels: quantized models and models with images do not run on a CPU.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any, NoReturn

PACKAGES = ("sgl_kernel", "torchvision")


def install() -> None:
    """Stand in for those of `PACKAGES` that are not installed; may be repeated."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()  # cached, so that transformers works without it
        sys.meta_path.append(_Finder(missing))


class _Name(type):
    """A class whose attributes exist as well, for enumerations and constants."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__module__}.{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__} is a stand-in: it has no build for a CPU"
        )


def _stand_in(full_name: str) -> Any:
    module, _, name = full_name.rpartition(".")
    return _Name(name, (), {"__module__": module})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find every module of a missing package, as a package."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See `Loader`."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing; see `Loader`."""
