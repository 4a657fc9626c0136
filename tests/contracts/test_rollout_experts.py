"""The contract of a rollout engine whose model is a mixture of experts.

For the engine that `--engine` names, as in test_rollout_engine. Covered: parity of logprobs with a
plain forward pass after an update of each part, also of prompts that were cached before it; an
update that lacks an expert. Experts are what engines pack for their kernels: 48 is a width that
some of them pad. Not covered: experts that are spread over workers.
"""

from collections.abc import Iterator

import pytest
import torch
from rlhf.testing.rollout_models import (
    EXPERT_GROUPS,
    changed,
    experts_config,
    largest_difference,
    model_of,
    tensors_of,
)
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests
from rlhf.testing.test_rollout_engine import MAX_LOGPROB_DIFFERENCE, WRONG_BY, engine_name

from engines.errors import WeightSyncError

__all__ = ["engine_name"]  # pytest finds the fixture by its name in this module


@pytest.fixture(scope="module")
def served(engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        directory = tmp_path_factory.mktemp("experts")
        made = Served(engine_name, False, directory, TIMEOUT_S, model_config=experts_config())
    yield made
    made.close()


@pytest.mark.parametrize("group", [*EXPERT_GROUPS, "projections", "norms"])
def test_an_update_of_one_part_is_served_whole(served: Served, group: str) -> None:
    made = model_of(experts_config(), 3)
    served.send(made, 0)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE
    before = model_of(experts_config(), 3)
    served.send(changed(made, group, 4), 1)
    asked = requests()
    completions = served.generate(asked)
    assert largest_difference(made, asked, completions) <= MAX_LOGPROB_DIFFERENCE
    assert largest_difference(before, asked, completions) > WRONG_BY


def test_update_missing_an_expert_is_refused_and_next_one_works(served: Served) -> None:
    made = model_of(experts_config(), 5)
    good = tensors_of(made)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    bad: dict[str, dict[str, torch.Tensor]] = {
        "missing": {n: t for n, t in good.items() if n != name},
        "shape": {**good, name: good[name][:-1].clone()},
    }
    for tensors in bad.values():
        with pytest.raises(WeightSyncError, match=r"experts\.2\.up_proj"):
            served.run(served.engine.update_weights(served.source(tensors), 1))
    served.send(made, 2)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE
