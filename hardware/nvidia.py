"""NVIDIA GPUs through CUDA and NCCL; builds for CUDA lookalikes (ROCm, MACA) are excluded."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hardware import nvidia_smi
from hardware.accelerator import AcceleratorPlatform, is_installed
from hardware.base import GraphCapture
from hardware.ipc_memory import IpcMemory, RuntimeIpcMemory
from infra.plugins import reason_of

if TYPE_CHECKING:
    import torch

FA3, FA3_MODULE = "FA3", "flash_attn_interface"
"""FlashAttention 3 (arXiv:2407.08608): name in `torch.nn.attention`, module with its kernels."""


def attention_implementation(major: int, offered: Collection[str]) -> str | None:
    """Return what to activate on a device of compute capability `major`; None: torch's own.

    FlashAttention 3 has kernels for Hopper (9) alone. `offered` is what torch can activate.
    """
    return FA3 if major == 9 and FA3 in offered and is_installed(FA3_MODULE) else None


class NvidiaPlatform(AcceleratorPlatform):
    """CUDA devices."""

    device_name = "cuda"
    vendor_name = "nvidia"
    communication_backend = "nccl"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    supports_ipc = True
    built_for = "CUDA"
    fp8_architectures = ("sm_89", "sm_9", "sm_10", "sm_11", "sm_12")

    # Vendor data sheets: dense tensor-core figures, half of those "with sparsity". float32 is the
    # rate outside the tensor cores, which torch uses unless TF32 is on.
    peaks = (
        # Blackwell and Blackwell Ultra; the Grace boards clock higher.
        ("GB300", {"bfloat16": 2500e12, "float16": 2500e12, "float32": 80e12}),
        ("GB200", {"bfloat16": 2500e12, "float16": 2500e12, "float32": 80e12}),
        ("B300", {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12}),
        ("B200", {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12}),
        # H100, H200 and GH200; H800 differs in links and float64, H20 in compute.
        ("H100 NVL", {"bfloat16": 835.5e12, "float16": 835.5e12, "float32": 60e12}),
        ("H100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}),
        ("H100", {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}),
        ("H800 PCIe", {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}),
        ("H800", {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}),
        ("H200 NVL", {"bfloat16": 835.5e12, "float16": 835.5e12, "float32": 60e12}),
        ("H200", {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}),
        ("GH200", {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}),
        ("H20", {"bfloat16": 148e12, "float16": 148e12, "float32": 44e12}),
        # A100; A800 differs in its links only.
        ("A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
        ("A800", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
        ("A40", {"bfloat16": 149.7e12, "float16": 149.7e12, "float32": 37.4e12}),
        # Ada, with float32 accumulation. Reduced boards of the same name have other peaks.
        ("L40S", {"bfloat16": 362.05e12, "float16": 362.05e12, "float32": 91.6e12}),
        ("L40", {"bfloat16": 181.05e12, "float16": 181.05e12, "float32": 90.5e12}),
        ("RTX 4090 D", {}),
        ("RTX 4090 Laptop", {}),
        ("RTX 4090", {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12}),
    )

    def driver_version(self) -> str | None:
        """See the base class."""
        return nvidia_smi.driver_version()

    def links(self) -> str | None:
        """See the base class."""
        return nvidia_smi.links()

    def graph_capture(self, device: "torch.device") -> GraphCapture:
        """Return a recorder of CUDA graphs, with a memory pool of its own.

        A recording raises torch.OutOfMemoryError as other work does.
        """
        import torch

        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

        def capture(work: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph()
            # torch keeps cuBLAS's workspace of a stream. One that was made while recording lies in
            # the pool: it would keep that memory, or be used after the pool is gone.
            torch._C._cuda_clearCublasWorkspaces()
            # The mode allows other threads to allocate meanwhile.
            try:
                with (
                    torch.cuda.device(device),
                    torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
                ):
                    work()
            except torch.AcceleratorError as error:  # the driver's own memory
                if "out of memory" not in str(error):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
            torch._C._cuda_clearCublasWorkspaces()
            return graph.replay

        return capture

    def choose_attention(self) -> str:
        """Activate FlashAttention 3 if it is installed for this device and loads."""
        from torch.nn import attention

        offered: list[str] = getattr(attention, "list_flash_attention_impls", list)()
        found = attention_implementation(self.device_module.get_device_capability()[0], offered)
        if found is None:
            return "FlashAttention 2"
        if attention.current_flash_attention_impl() != found:
            try:
                attention.activate_flash_attention_impl(found)
            except (ImportError, OSError, RuntimeError) as error:  # built for another torch
                return f"FlashAttention 2 ({FA3_MODULE} does not load: {reason_of(error)})"
        return "FlashAttention 3"

    def ipc_memory(self) -> IpcMemory:
        """Return memory through the CUDA runtime."""
        return RuntimeIpcMemory("cuda", "libcudart")

    def training_env_vars(self, library: str) -> dict[str, str]:
        """Let segments grow, so that varying lengths leave no holes; order Megatron's launches."""
        found = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        return found | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if library == "megatron" else {})

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Return an NVTX range."""
        import torch

        return torch.cuda.nvtx.range(name)
