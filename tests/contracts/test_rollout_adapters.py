"""The contract of a rollout engine about adapters, which come alone beside weights that stay.

For the engine that `--engine` names, as in test_rollout_engine; one whose row lacks the capability
refuses them. Covered: parity of logprobs with merged weights, also of prompts that were cached
under the adapter before; samples that a new adapter interrupts; adapters that are not whole; what
takes an adapter away. For engines with fault points: that these tests see what they are for.
"""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from rlhf.testing.rollout_models import model, receipt_of, reference_logprobs
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests
from rlhf.testing.test_rollout_engine import (
    MAX_LOGPROB_DIFFERENCE,
    WRONG_BY,
    endless_prompts,
    engine_name,
)
from torch import Tensor

from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.training import LoraConfig
from engines.errors import RolloutError, WeightSyncError
from engines.types import RolloutRequest, SamplingParams

__all__ = ["engine_name"]  # pytest finds the fixture by its name in this module

LORA = LoraConfig(rank=4, alpha=12.0)
STALE_CACHE = {"vllm": "vllm.prefix_reset=nan@3"}
"""What keeps the cache of the adapter before, by engine: behind weights and a first adapter."""


def takes_adapters(engine_name: str) -> bool:
    return "adapters" in ROLLOUT_ENGINES.place(engine_name).capabilities


@pytest.fixture(scope="module")
def served(engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not takes_adapters(engine_name):
        pytest.skip(f"needs an engine with the capability adapters; {engine_name} has it not")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        directory = tmp_path_factory.mktemp("adapters")
        made = Served(engine_name, True, directory, TIMEOUT_S, adapter=LORA)
    yield made
    made.close()


def adapter_of(made, seed: int) -> dict[str, Tensor]:
    """Random pairs beside every projection."""
    torch.manual_seed(seed)
    pairs: dict[str, Tensor] = {}
    for name, weight in made.named_parameters():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            pairs[f"{module}.lora_A.weight"] = torch.randn(LORA.rank, weight.shape[1]) * 0.2
            pairs[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], LORA.rank) * 0.2
    return pairs


@torch.no_grad()
def merged(made, pairs: dict[str, Tensor]):
    """W + alpha / rank * B @ A (arXiv:2106.09685, sec. 4.1), written out."""
    whole = deepcopy(made)
    parameters = dict(whole.named_parameters())
    for name, a in pairs.items():
        if name.endswith("lora_A.weight"):
            b = pairs[name.replace("lora_A", "lora_B")]
            weight = parameters[name.removesuffix("lora_A.weight") + "weight"]
            weight += 12.0 / 4 * (b @ a)
    return whole


def send_adapter(served: Served, pairs: dict[str, Tensor], version: int) -> None:
    receipt = served.run(served.engine.update_adapter(served.source(pairs), version))
    assert receipt == receipt_of(pairs)
    served.run(served.engine.finish_update(version, receipt.digest))


def test_an_engine_without_the_capability_refuses_adapters(engine_name, tmp_path_factory) -> None:
    if takes_adapters(engine_name):
        pytest.skip(f"needs an engine without the capability adapters; {engine_name} has it")
    made = Served(engine_name, True, tmp_path_factory.mktemp("plain"), TIMEOUT_S)
    try:
        base = model(True, 1)
        made.send(base, 0)
        with pytest.raises(WeightSyncError, match="adapter"):
            made.run(made.engine.update_adapter(made.source(adapter_of(base, 1)), 1))
    finally:
        made.close()


def test_an_adapter_needs_weights_to_stand_on(served: Served) -> None:
    served.run(served.engine.sleep())
    served.run(served.engine.wake_up())
    with pytest.raises(WeightSyncError, match="no weights"):
        served.run(served.engine.update_adapter(served.source(adapter_of(model(True, 1), 1)), 0))


def test_new_adapter_applies_to_previously_cached_prompts(
    served: Served,
) -> None:
    base = model(True, 1)
    served.send(base, 0)
    assert served.parity(base) <= MAX_LOGPROB_DIFFERENCE
    for version in (1, 2, 3):
        pairs = adapter_of(base, version)
        send_adapter(served, pairs, version)
        assert served.engine.version == version
        assert served.parity(merged(base, pairs)) <= MAX_LOGPROB_DIFFERENCE
        assert served.parity(base) > WRONG_BY


def test_score_is_of_weights_and_adapter(served: Served) -> None:
    base = model(True, 1)
    served.send(base, 0)
    pairs = adapter_of(base, 5)
    send_adapter(served, pairs, 1)
    ids = [5, 9, 11, 20, 6, 7]
    (found,) = served.run(served.engine.score([ids], 0.7))
    asked = RolloutRequest("r", (ids[0],), SamplingParams(8, temperature=0.7), (0,))
    expected = reference_logprobs(merged(base, pairs), asked, ids[1:])
    assert (torch.tensor(found) - expected).abs().max() <= MAX_LOGPROB_DIFFERENCE


def interrupted_difference(served: Served) -> float:
    """Largest of samples that a new adapter interrupts, each token's by the adapter it names."""
    base = model(True, 1)
    served.send(base, 0)
    first, second = adapter_of(base, 1), adapter_of(base, 2)
    send_adapter(served, first, 1)
    old, new = merged(base, first), merged(base, second)
    greedy = SamplingParams(300, temperature=0.0)
    long = [RolloutRequest(f"long={i}", (i,), greedy, (0,)) for i in endless_prompts(old, 2)]
    short = RolloutRequest("short", (5,), SamplingParams(3, temperature=0.0), (0,))
    source = served.source(second)

    async def scenario():
        engine = served.engine
        stream = engine.generate([short, *long])
        found = [await anext(stream)]
        with pytest.raises(WeightSyncError):  # in flight, and not paused
            await engine.update_adapter(source, 2)
        await engine.pause()
        receipt = await engine.update_adapter(source, 2)
        await engine.finish_update(2, receipt.digest)
        await engine.resume()
        return found + [completion async for completion in stream]

    completions = {c.request_id: c for c in served.run(scenario())}
    worst = 0.0
    for request in long:
        c = completions[request.request_id]
        num_old = c.policy_versions.tolist().count(1)
        assert 0 < num_old < len(c.token_ids)
        by_old, by_new = (reference_logprobs(m, request, c.token_ids.tolist()) for m in (old, new))
        expected = torch.cat([by_old[:num_old], by_new[num_old:]])
        worst = max(worst, float((torch.tensor(c.logprobs) - expected).abs().max()))
    return worst


def test_samples_that_a_new_adapter_interrupts_continue_with_it(served: Served) -> None:
    assert interrupted_difference(served) <= MAX_LOGPROB_DIFFERENCE


def test_incomplete_adapter_is_refused_and_next_one_works(served: Served) -> None:
    base = model(True, 1)
    served.send(base, 0)
    pairs = adapter_of(base, 3)
    a = next(name for name in pairs if "lora_A" in name)
    wrong = {
        "missing": {name: tensor for name, tensor in pairs.items() if name != a},
        "shape": {**pairs, a: torch.zeros(LORA.rank + 1, pairs[a].shape[1])},
        "dtype": {**pairs, a: pairs[a].double()},
        "unknown": {**pairs, "model.layers.9.mlp.up_proj.lora_A.weight": pairs[a].clone()},
        "empty": {"nothing.lora_A.weight": torch.zeros(1)},
    }
    for tensors in wrong.values():
        with pytest.raises(WeightSyncError):
            served.run(served.engine.update_adapter(served.source(tensors), 1))
        with pytest.raises(RolloutError):
            served.generate(requests())
    send_adapter(served, pairs, 1)
    assert served.parity(merged(base, pairs)) <= MAX_LOGPROB_DIFFERENCE


def test_another_digest_is_not_served(served: Served) -> None:
    base = model(True, 1)
    served.send(base, 0)
    pairs = adapter_of(base, 3)
    receipt = served.run(served.engine.update_adapter(served.source(pairs), 1))
    pairs[next(iter(pairs))].view(torch.int32)[0, 0] ^= 1
    assert receipt.digest != receipt_of(pairs).digest
    with pytest.raises(WeightSyncError, match="digest"):
        served.run(served.engine.finish_update(1, receipt_of(pairs).digest))
    with pytest.raises(RolloutError):
        served.generate(requests())


def test_new_weights_take_the_adapter_away(served: Served) -> None:
    base, other = model(True, 1), model(True, 2)
    served.send(base, 0)
    send_adapter(served, adapter_of(base, 3), 1)
    served.send(other, 2)
    assert served.parity(other) <= MAX_LOGPROB_DIFFERENCE


def test_the_parity_above_sees_what_the_adapter_before_computed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if served.name not in STALE_CACHE:
        pytest.skip(f"needs a fault point of {served.name} that keeps its cache")
    monkeypatch.setenv("RLHF_FAULTS", STALE_CACHE[served.name])
    assert interrupted_difference(served) > WRONG_BY
