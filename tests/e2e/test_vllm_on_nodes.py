"""A pipeline whose answers come from vLLM on another node than the ranks'."""

from pathlib import Path

import pytest
from namespaces import PIPELINES, PIPELINES_DEADLINE_S, environment_of_nodes, printed_by
from tiny_pipeline import settings

from infra.job_environments import interpreter_of

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

ON_VLLM = ("rollout.engine=vllm", "model.architecture.head_dim=32")


def test_vllm_weights_match_and_replica_of_a_dead_node_moves(
    tmp_path: Path,
) -> None:
    environment = environment_of_nodes()
    if interpreter_of("vllm") is None:
        pytest.skip("needs the job environment vllm: make env-vllm")
    words = ("whole", "replica", *settings(*ON_VLLM))
    played = printed_by(PIPELINES, tmp_path, environment, PIPELINES_DEADLINE_S, *words)
    for name in ("whole", "replica"):
        assert played[name]["code"] == 0, played[name]["printed"]
        values = played[name]["values"]
        assert sorted(each["step"] for each in values) == list(range(1, 17))
        assert max(each["mismatch/logprob_abs_max"] for each in values) < 1e-4
    assert any(each["rollout/num_restarts"] for each in played["replica"]["values"])
