"""Memory of a device that other processes of the node can open.

Promises: a handle is bytes that do not depend on torch's version. The memory is outside torch's
allocator, whose expandable segments cannot be shared in unprivileged containers.
Does not promise: that a device can open memory of another one, which needs peer access (NVLink,
XGMI, PCIe), but not that both are visible. Owners free memory after the others closed it.
"""

import ctypes
import mmap
import os
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BLOCK_BYTES = 2**21


class IpcMemory(Protocol):
    """Allocates and opens memory on the current device; every tensor is (N,) uint8.

    Every method raises RuntimeError, with the cause, if the device or the system refuses.
    """

    @abstractmethod
    def allocate(self, num_bytes: int) -> "Tensor":
        """Return new memory; its contents are undefined."""

    @abstractmethod
    def handle(self, memory: "Tensor") -> bytes:
        """Return the handle of allocated memory, for `open` in another process."""

    @abstractmethod
    def open(self, handle: bytes, num_bytes: int) -> "Tensor":
        """Return the memory of a handle."""

    @abstractmethod
    def close(self, memory: "Tensor") -> None:
        """Close memory that was opened; it must not be used afterwards."""

    @abstractmethod
    def free(self, memory: "Tensor") -> None:
        """Free memory that was allocated; no process may use it afterwards."""


class HostIpcMemory:
    """Anonymous shared memory of the host (`memfd_create`), for engines on a CPU."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> "Tensor":
        """See `IpcMemory`."""
        file = os.memfd_create("rlhf-weights")
        try:
            # Allocated here, so that full memory is an error, not SIGBUS at the first write.
            os.posix_fallocate(file, 0, num_bytes)
            memory = _mapped(file, num_bytes)
        except OSError as error:
            os.close(file)
            raise RuntimeError(f"{num_bytes} bytes of shared memory: {error}") from error
        self._files[memory.data_ptr()] = file
        return memory

    def handle(self, memory: "Tensor") -> bytes:
        """See `IpcMemory`; the path of the memory among the files of this process."""
        return f"/proc/{os.getpid()}/fd/{self._files[memory.data_ptr()]}".encode()

    def open(self, handle: bytes, num_bytes: int) -> "Tensor":
        """See `IpcMemory`."""
        try:
            with Path(handle.decode()).open("r+b") as file:
                return _mapped(file.fileno(), num_bytes)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"shared memory {handle.decode()}: {error}") from error

    def close(self, memory: "Tensor") -> None:
        """See `IpcMemory`; the memory ends with its last tensor."""

    def free(self, memory: "Tensor") -> None:
        """See `IpcMemory`."""
        os.close(self._files.pop(memory.data_ptr()))


class RuntimeIpcMemory:
    """Memory through the runtime that torch has loaded: `prefix` is `cuda` or `hip`."""

    def __init__(self, prefix: str, library: str) -> None:
        import torch

        torch.cuda.synchronize()  # creates the context, and loads the library
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        path = next((line.split(maxsplit=5)[5] for line in lines if library in line), None)
        if path is None:
            raise RuntimeError(f"{library} is not loaded, so device memory cannot be shared")
        self._prefix, self._library = prefix, ctypes.CDLL(path)
        getattr(self._library, f"{prefix}GetErrorString").restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> "Tensor":
        """See `IpcMemory`."""
        pointer = ctypes.c_void_p()
        # Smaller allocations share a block, and a handle is one of a whole block.
        whole = ctypes.c_size_t(-(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        self._call("Malloc", ctypes.byref(pointer), whole)
        return _at(pointer, num_bytes)

    def handle(self, memory: "Tensor") -> bytes:
        """See `IpcMemory`."""
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr()))
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> "Tensor":
        """See `IpcMemory`."""
        pointer, given = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("IpcOpenMemHandle", ctypes.byref(pointer), given, flags)
        return _at(pointer, num_bytes)

    def close(self, memory: "Tensor") -> None:
        """See `IpcMemory`."""
        self._call("IpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))

    def free(self, memory: "Tensor") -> None:
        """See `IpcMemory`."""
        self._call("Free", ctypes.c_void_p(memory.data_ptr()))

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, f"{self._prefix}{name}")(*arguments):
            reason = getattr(self._library, f"{self._prefix}GetErrorString")(code).decode()
            # Else torch would report it later.
            getattr(self._library, f"{self._prefix}GetLastError")()
            raise RuntimeError(f"{self._prefix}{name}: {reason}")


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t` and `hipIpcMemHandle_t`, which are passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def _mapped(file: int, num_bytes: int) -> "Tensor":
    import torch

    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def _at(pointer: ctypes.c_void_p, num_bytes: int) -> "Tensor":
    """Return memory at a pointer as a tensor on the current device."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    # The device is given: for memory of an invisible device the pointer would not tell one.
    storage: Any = torch._C._construct_storage_from_data_pointer(pointer.value, device, num_bytes)  # pyright: ignore[reportArgumentType]
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
