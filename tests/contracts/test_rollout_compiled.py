"""What vLLM compiled is found again: the key of its cache, as vLLM itself computes it."""

from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.rollout_models import config

from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.rollout.served.weight_receiver import read_layout
from hardware.cpu import CPUPlatform
from infra import env

VLLM_CACHE, TRITON_CACHE = env.VLLM_CACHE_ROOT, env.TRITON_CACHE_DIR


@pytest.fixture(autouse=True)
def home(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.config.getoption("--engine") != "vllm":
        pytest.skip("needs the engine vllm (--engine vllm): its compile cache is tested")
    row = ROLLOUT_ENGINES.place("vllm")
    pytest.importorskip("vllm", reason=f"run it in .envs/{row.environment}")
    for variable in (VLLM_CACHE, TRITON_CACHE, env.TORCHDYNAMO_DISABLE):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(env.RLHF_HOME.name, str(tmp_path / "home"))
    return tmp_path / "home"


def vllm_config_of(directory: Path, rollout: RolloutConfig, **changes: object) -> Any:
    """vLLM's configuration for a model in a directory of its own."""
    from engines.rollout.vllm.engine import vllm_config

    made = config(tied=False)
    for name, value in changes.items():
        setattr(made, name, value)
    made.save_pretrained(directory)
    layout = read_layout(directory, "vllm", "bfloat16")
    return vllm_config(directory, rollout, "bfloat16", CPUPlatform(), layout, None)


def test_the_stages_of_a_run_share_what_was_compiled(home: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(engine="vllm", max_num_sequences=6)
    first = vllm_config_of(tmp_path / "sft", rollout).compute_hash()
    assert VLLM_CACHE.get() == str(home / "compiled" / "vllm")
    assert Path(TRITON_CACHE.require()).is_relative_to(home)
    assert vllm_config_of(tmp_path / "rl", rollout).compute_hash() == first
    # The files of a hub model are in another dtype than those of a policy.
    assert vllm_config_of(tmp_path / "hub", rollout, dtype="float32").compute_hash() == first
    wider = vllm_config_of(tmp_path / "wide", rollout, intermediate_size=96)
    assert wider.compute_hash() != first
    quantized = rollout.model_copy(update={"quantization": "fp8"})
    assert vllm_config_of(tmp_path / "fp8", quantized).compute_hash() != first


def test_the_users_own_caches_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (VLLM_CACHE, TRITON_CACHE):
        monkeypatch.setenv(variable.name, str(tmp_path / variable.name))
    vllm_config_of(tmp_path / "model", RolloutConfig(engine="vllm"))
    for variable in (VLLM_CACHE, TRITON_CACHE):
        assert variable.get() == str(tmp_path / variable.name)


@pytest.mark.parametrize(("max_num_sequences", "largest"), [(6, 8), (64, 128), (256, 512)])
def test_graphs_are_as_large_as_the_batches(
    tmp_path: Path, max_num_sequences: int, largest: int
) -> None:
    """At most twice the sequences, for steps that also prefill; a CPU itself has no graphs."""
    from vllm.config import CUDAGraphMode

    rollout = RolloutConfig(engine="vllm", max_num_sequences=max_num_sequences)
    made = vllm_config_of(tmp_path / "model", rollout)
    made.model_config.enforce_eager = False
    made.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        setattr(made.compilation_config, name, None)
    made._set_cudagraph_sizes()
    sizes = made.compilation_config.cudagraph_capture_sizes
    assert max_num_sequences in sizes
    assert max(sizes) == largest
