"""The devices of these tests: one NVIDIA GPU, and the CPU as a twin of every case.

`python -m pytest tests/gpu -m gpu` runs the GPU half, on a machine with torch (CUDA) and
transformers; Ray, Prefect and MLflow are not needed. Without a GPU that half is skipped and says
what it needs; the CPU half (`-m "slow and not gpu"`) runs everywhere and keeps the cases honest.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from engines.collectives import close_process_group
from hardware.base import PlatformBase
from hardware.cpu import CPUPlatform
from hardware.nvidia import NvidiaPlatform

PLATFORMS: dict[str, type[PlatformBase]] = {"cpu": CPUPlatform, "nvidia": NvidiaPlatform}


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("nvidia", marks=pytest.mark.gpu),
    ]
)
def platform(request: pytest.FixtureRequest) -> Iterator[PlatformBase]:
    """The platform a case runs on; its process group is closed behind the case."""
    chosen = PLATFORMS[request.param]()
    available = chosen.is_available()
    if not available.ok:
        pytest.skip(f"needs one NVIDIA GPU and a torch built for CUDA: {available.reason}")
    yield chosen
    close_process_group()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 0.5 M float32 parameters with grouped attention; no tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=3,
        pad_token_id=0,
    )
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory
