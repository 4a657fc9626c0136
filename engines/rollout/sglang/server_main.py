"""SGLang's HTTP server as a child process that ends with its owner.

`python -m engines.rollout.sglang.server_main DIRECTORY` reads the arguments of `ServerArgs` from
`DIRECTORY/arguments.json`. Secrets are passed only in the environment.
On a CPU it installs stand-ins for packages that SGLang 0.5.23 imports on every platform and never
calls there: `sgl_kernel`, which has only CUDA builds, and `torchvision`, whose build needs CUDA.
Promises: arguments that SGLang refuses, and models whose sliding window it would ignore, are
reported in `DIRECTORY/refusal`. When the owner is gone, the process group is
killed within `POLL_S`, and its shared memory and directory are removed. Calling anything in a
stand-in raises NotImplementedError with its full name; an installed package is left alone.
Does not promise kernels: quantized models and models with images do not run on a CPU.
"""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from engines.rollout.sglang.options import NUM_HELD_BACK
from infra import env

PACKAGES = ("sgl_kernel", "torchvision")
ARGUMENTS, REFUSAL = "arguments.json", "refusal"
POLL_S = 0.5
SHARED_MEMORY = "/dev/shm/sglang_"  # noqa: S108  a prefix of names, not a file


def install() -> None:
    """Install stand-ins for those of `PACKAGES` that are missing; may be repeated."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()  # cached, so that transformers works without it
        sys.meta_path.append(_Finder(missing))


@cache
def _stand_in(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {"__module__": owner})


class _Name(type):
    """A stand-in class; every attribute of it, such as a constant, is a stand-in, too."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__} is a stand-in: it has no build for a CPU"
        )


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a package's spec for any name in a missing package; None for other names."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Make every attribute of the module a stand-in."""
        vars(module)["__getattr__"] = partial(_stand_in, module.__name__)


# At import and not in `main`: SGLang spawns its other processes, which import this module first.
if env.SGLANG_USE_CPU_ENGINE.get():
    install()


def shared_memory_of(pid: int) -> set[Path]:
    """Return SGLang's `/dev/shm` files mapped by a process or its children; a kill leaves them."""
    found: set[Path] = set()
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error, NotImplementedError):
                found |= {Path(each.path) for each in process.memory_maps()}
    return {path for path in found if str(path).startswith(SHARED_MEMORY)}


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def main() -> None:
    """Serve until the owner ends this process, or is gone."""
    directory = Path(sys.argv[1])
    threading.Thread(
        target=_end_with, args=(os.getppid(), directory), name="watch-owner", daemon=True
    ).start()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    try:
        arguments = json.loads((directory / ARGUMENTS).read_text(encoding="utf-8"))
        server_args: Any = ServerArgs(**arguments, api_key=env.RLHF_SGLANG_KEY.require())
        server_args.resolve_once()
        context_length = server_args.context_length - NUM_HELD_BACK
        check_window(Path(server_args.model_path), context_length, _model_class)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        (directory / REFUSAL).write_text(" ".join(str(error).split()), encoding="utf-8")
        raise
    launch_server(server_args)


def check_window(
    hf_dir: Path, context_length: int, model_class: Callable[[str], type[Any]]
) -> None:
    """Refuse, with a ValueError, a model whose sliding window SGLang would silently ignore.

    SGLang 0.5 has a class per architecture; those without a method that returns the window, such as
    Mistral's, attend to everything.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or window >= context_length or (kinds and "sliding_attention" not in kinds):
        return
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    if not hasattr(model_class(name), "get_attention_sliding_window_size"):
        raise ValueError(
            f"it computes {name} without its sliding window of {window} tokens; set max_model_len "
            "to that, or choose another engine"
        )


def _model_class(name: str) -> type[Any]:
    from sglang.srt.models.registry import ModelRegistry

    return ModelRegistry.resolve_model_cls([name])[0]


def _end_with(owner: int, directory: Path) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_S)
    remove(shared_memory_of(os.getpid()))
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
