"""vLLM with 8-bit floats on one device: every sync quantizes the trained weights anew.

Run in vLLM's environment: `.envs/vllm/bin/python -m pytest tests/gpu/test_vllm_quantization.py -m
gpu`, with the folder that `rlhf.testing` lies in on the path. The CPU half is in the contract
(`tests/contracts/test_rollout_quantization.py`); here it keeps the case honest.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf.testing.rollout_models import changed, config, mean_difference, model_of, quantized
from rlhf.testing.served_engine import Served, requests

from engines.trainers.mismatch import BOUNDS
from hardware.base import PlatformBase

START_S = 300.0
MUCH = 0.5


def wide():
    """Heads of 64, the smallest that vLLM computes on a GPU."""
    made = config(tied=False)
    made.update({"hidden_size": 128, "head_dim": 64, "intermediate_size": 256})
    return made


@pytest.fixture
def served(platform: PlatformBase, tmp_path: Path) -> Iterator[Served]:
    pytest.importorskip("vllm", reason="run with .envs/vllm/bin/python (make env-vllm)")
    if not platform.supports_fp8():
        pytest.skip("needs a GPU of compute capability 8.9 or later")
    made = Served(
        "vllm", False, tmp_path, START_S,
        model_config=wide(), dtype="bfloat16", quantization="fp8", platform=platform,
    )  # fmt: skip
    yield made
    made.close()


def test_every_sync_quantizes_all_layers_anew(served: Served) -> None:
    made = model_of(wide(), 1).bfloat16()
    for version, group in enumerate((None, "projections", "norms")):
        before = quantized(made)
        if group is not None:
            made = changed(made, group, version)
        served.send(made, version)
        found = served.generate(requests())
        from_trained = mean_difference(made, requests(), found)
        assert mean_difference(quantized(made), requests(), found) < from_trained
        assert from_trained < BOUNDS["fp8"][0], "the gate would stop a healthy run"
        if group is not None:
            assert mean_difference(before, requests(), found) > MUCH
