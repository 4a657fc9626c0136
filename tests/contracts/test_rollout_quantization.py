"""The contract of a rollout engine that multiplies 8-bit floats (`rollout.quantization: fp8`).

The reference quantizes by itself, so it tells whether all layers hold the last weights, quantized.
"""

from collections.abc import Iterator

import pytest
from rlhf.testing.rollout_models import changed, mean_difference, model, quantized, tensors_of
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests

from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError, WeightSyncError
from engines.trainers.mismatch import BOUNDS

MUCH = 0.5
"""Nats by which other weights differ; these models differ by 0.1 from their quantized selves."""


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Iterator[Served]:
    name = request.config.getoption("--engine")
    row = ROLLOUT_ENGINES.place(name)
    if "fp8" not in row.capabilities:
        pytest.skip(f"{name} has no 8-bit floats")
    pytest.importorskip(row.requires, reason=f"run it in .envs/{row.environment}")
    made = Served(
        name, False, tmp_path_factory.mktemp("fp8"), TIMEOUT_S,
        dtype="bfloat16", quantization="fp8",
    )  # fmt: skip
    yield made
    made.close()


def test_every_sync_quantizes_all_layers_anew(served: Served) -> None:
    made = model(False, 1).bfloat16()
    for version, group in enumerate((None, "projections", "norms", "projections")):
        before = quantized(made)
        if group is not None:
            made = changed(made, group, version)
        served.send(made, version)
        found = served.generate(requests())
        from_quantized = mean_difference(quantized(made), requests(), found)
        from_trained = mean_difference(made, requests(), found)
        assert from_quantized < 0.75 * from_trained
        assert from_trained < BOUNDS["fp8"][0], "the gate would stop a healthy run"
        if group is not None:
            assert mean_difference(before, requests(), found) > MUCH


def test_a_broken_sync_leaves_no_mixture_of_versions(served: Served) -> None:
    old, new = model(False, 2).bfloat16(), model(False, 3).bfloat16()
    served.send(old, 10)
    part = {name: tensor for name, tensor in tensors_of(new).items() if ".1.mlp." not in name}
    with pytest.raises(WeightSyncError, match="got no weights for|were not sent"):
        served.run(served.engine.update_weights(served.source(part), 11))
    with pytest.raises(RolloutError, match="no confirmed weights"):
        served.generate(requests())
    served.send(old, 12)
    found = served.generate(requests())
    assert mean_difference(quantized(old), requests(), found) < MUCH / 4
    assert mean_difference(quantized(new), requests(), found) > MUCH
