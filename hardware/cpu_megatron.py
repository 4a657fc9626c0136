"""Make Megatron-Core run on a CPU with gloo: its calls of `torch.cuda` run on the host.

Megatron-Core names its device "cuda" in hundreds of places. Inside the scope, such tensors are made
on the host, streams and events do nothing, the device's random generator is the host's, and
`torch.compile` returns functions unchanged. The scope's end restores what it replaced.
Promises: results equal those of the same arithmetic in plain torch. Threads share the `torch.cuda`
replacements until the first scope ends; devices are rewritten only in the thread that opened it.
Megatron-Core must first be imported inside the scope, since it compiles functions at import.
Not covered: TransformerEngine, CUDA graphs, asynchronous activation offload.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hardware.replaced import replaced

_CPU = torch.device("cpu")
_JIT = "megatron.core.jit"
_RANDOM = "megatron.core.tensor_parallel.random"
_DISPATCHERS = (
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
)
_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved")
_open_scopes = 0


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Scope in which Megatron-Core is imported and used; may be nested."""
    global _open_scopes
    with ExitStack() as stack:
        if _open_scopes == 0:
            _enter(stack)
        _open_scopes += 1
        try:
            yield
        finally:
            _open_scopes -= 1


def _enter(stack: ExitStack) -> None:
    stack.enter_context(_CudaOnHost())
    for owner, attributes in (
        (torch.cuda, _cuda_replacements()),
        (torch.cuda.random, _GENERATOR),
        (torch.cuda.nvtx, {"range_push": _nothing(), "range_pop": _nothing()}),
        (torch, {"compile": _uncompiled}),
    ):
        stack.enter_context(replaced(owner, attributes))
    with warnings.catch_warnings():
        # Megatron-Core warns about every optional CUDA library that is absent.
        warnings.simplefilter("ignore")
        names = (_JIT, _RANDOM, *_DISPATCHERS)
        jit, random, *dispatchers = (importlib.import_module(name) for name in names)
    for owner, attributes in (
        (jit, {"jit_fuser": _uncompiled}),
        (random, _TRACKER),
        # It warns that the host's generator changed, which here is the device's as well.
        (logging.getLogger(_RANDOM), {"disabled": True}),
        *((module, {"maybe_move_tensor_to_cpu": _split_sizes}) for module in dispatchers),
    ):
        stack.enter_context(replaced(owner, attributes))


class _CudaOnHost(TorchFunctionMode):
    """Rewrites the device "cuda" to the host in `device=` and in the arguments of `to`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer recognizes dtypes by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        if not kwargs:
            return func(*args)
        changed = dict(kwargs)
        if _is_cuda(changed.get("device")):
            changed["device"] = _CPU
        if changed.get("pin_memory"):
            changed["pin_memory"] = False
        return func(*args, **changed)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


class _Idle:
    """Stands for streams, events and device scopes; all work is already done."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Idle") -> float:
        return 0.0

    def record_event(self, event: "_Idle | None" = None) -> "_Idle":
        return event or _Idle()

    def _wait(self, *args: Any) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = _wait


def _nothing() -> Callable[..., None]:
    """Return a function that does nothing: one for each name, because dynamo refuses duplicates."""
    return lambda *args, **kwargs: None


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _uncompiled(model: Any = None, **kwargs: Any) -> Any:
    return model if model is not None else lambda function: function


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace a function of Megatron-Core that converts only tensors on CUDA."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_GENERATOR: Mapping[str, Any] = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
_TRACKER: Mapping[str, Any] = {
    "_get_cuda_rng_state": _get_rng_state,
    "_set_cuda_rng_state": _set_rng_state,
}


def _cuda_replacements() -> Mapping[str, Any]:
    idle = _Idle()
    return {
        **_GENERATOR,
        "manual_seed": torch.manual_seed,
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "set_device": _nothing(),
        "device": _Idle,
        "Stream": _Idle,
        "Event": _Idle,
        "stream": lambda stream: idle,
        "current_stream": lambda *args: idle,
        "default_stream": lambda *args: idle,
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        **dict.fromkeys(_MEMORY, lambda *args, **kwargs: 0),
    }
