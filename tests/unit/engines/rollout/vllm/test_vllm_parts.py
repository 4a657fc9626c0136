"""What of the engine vllm can be told without vLLM; the rest is its contract (`--engine vllm`)."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.engine import RunningSample
from engines.rollout.vllm.options import VllmOptions
from engines.rollout.vllm.translation import (
    check_temperature,
    completion,
    prompt_rows,
    vllm_seed,
)
from engines.types import Completion, RolloutRequest, SamplingParams

LOCKS = Path(__file__).resolve().parents[5] / "infra/locks/cpu"


def pins(name: str) -> dict[str, str]:
    lines = (LOCKS / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def sample(temperature: float = 1.0) -> RunningSample:
    request = RolloutRequest("a", (5,), SamplingParams(4, temperature), (1,))
    return RunningSample(request, 0, 0, "0/0/a")


def span(version: str, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=version, start=start, end=end)


def output(**changes) -> SimpleNamespace:
    rows = [{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-1.5)}]
    found = {
        "token_ids": [7, 8],
        "logprobs": rows,
        "weight_versions": [span("3", 0, 1), span("4", 1, 2)],
        "finish_reason": "length",
    }
    return SimpleNamespace(**{**found, **changes})


def test_engine_environment_matches_ray_without_control_plane() -> None:
    own, core = pins("vllm.lock"), pins("core.lock")
    assert own["ray"] == core["ray"]
    assert not {"prefect", "mlflow", "torchvision", "torchaudio", "triton"} & own.keys()
    assert ROLLOUT_ENGINES.place("vllm").environment == "vllm"


@pytest.mark.parametrize("name", ["load_format", "model", "enable_chunked_prefill"])
def test_an_argument_on_which_the_contract_stands_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        VllmOptions(engine_args={name: "auto"})
    assert VllmOptions(engine_args={"swap_space": 1}).engine_args == {"swap_space": 1}


def test_seeds_of_any_size_become_seeds_of_32_bits_that_differ() -> None:
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**62 + 5, 2**63 - 1, -1]
    folded = [vllm_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**32 for seed in folded)
    assert len({vllm_seed(2**40 + seed) for seed in range(1000)}) == 1000
    assert vllm_seed(2**62 + 5) == vllm_seed(2**62 + 5)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_that_vllm_keeps(temperature: float) -> None:
    check_temperature(sample(temperature).request)


@pytest.mark.parametrize("temperature", [0.005, 2.1])
def test_vllm_refuses_a_temperature_outside_its_range(temperature: float) -> None:
    with pytest.raises(RolloutError, match=f"temperature is {temperature}; .* 0.01 to 2.0"):
        check_temperature(sample(temperature).request)


def test_behind_spent_draws_vllm_starts_another_stream() -> None:
    seeds = [vllm_seed(7, offset) for offset in range(200)]
    assert seeds[0] == vllm_seed(7)
    assert len(set(seeds)) == 200
    assert vllm_seed(7, 3) != vllm_seed(8, 3)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_stop_string_cuts_what_vllm_sampled_beyond_it() -> None:
    cut = replace(sample(), num_until_stop=1)
    found = completion(cut, output(finish_reason="abort"))
    assert found == Completion("a", 0, (7,), (-0.5,), (3,), "stop")


def test_each_token_gets_the_version_of_its_span() -> None:
    found = completion(sample(), output())
    assert found == Completion("a", 0, (7, 8), (-0.5, -1.5), (3, 4), "length")


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None},
        {"weight_versions": None},
        {"weight_versions": [span("3", 0, 1)]},
        {"finish_reason": "error"},
    ],
    ids=str,
)
def test_a_completion_that_is_not_whole_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RolloutError):
        completion(sample(), output(**changes))


def test_an_abort_before_the_first_token_is_an_empty_completion() -> None:
    nothing = output(token_ids=[], logprobs=None, weight_versions=[], finish_reason="abort")
    assert completion(sample(), nothing) == sample().empty()


class Llm:
    """An `AsyncLLM` that says of each prompt what vLLM 0.32 does: a mapping for each token."""

    def __init__(self, told: list[Any]) -> None:
        self.told, self.asked = told, list[tuple[Any, Any, str]]()

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked.append((prompt, params, request_id))
        yield SimpleNamespace(prompt_logprobs=None)
        yield SimpleNamespace(prompt_logprobs=self.told)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    """With the few names of vLLM that asking needs."""
    inputs, sampling = ModuleType("vllm.inputs.engine"), ModuleType("vllm.sampling_params")
    inputs.tokens_input = list  # type: ignore[attr-defined]
    sampling.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    for module in (inputs, sampling):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def told(**logprobs: float) -> dict[int, SimpleNamespace]:
        return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in logprobs.items()}

    # The token that stands there comes first; of the last one it is among the two likeliest.
    return Llm([None, told(t6=-4.0, t9=-0.5, t2=-1.5), told(t7=-0.7, t1=-0.9)])


def test_vllm_prompt_token_outside_top_k_is_not_listed(llm: Llm) -> None:
    request = PromptRequest("a", (5, 6, 7), 1, num_top=2)
    found = asyncio.run(prompt_rows(llm, request, 2, "prompt/0"))
    assert found.logprobs == [-4.0, -0.7]
    assert found.likeliest == [[(-0.5, 9), (-1.5, 2)], [(-0.7, 7), (-0.9, 1)]]
    [(prompt, params, name)] = llm.asked
    assert (prompt, name) == ([5, 6, 7], "prompt/0")
    assert (params.prompt_logprobs, params.max_tokens) == (2, 1)


def test_only_what_is_asked_about_is_read_of_a_prompt(llm: Llm) -> None:
    found = asyncio.run(prompt_rows(llm, PromptRequest("a", (5, 6, 7), 2), 0, "prompt/0"))
    assert (found.logprobs, found.likeliest) == ([-0.7], ())
    assert llm.asked[0][1].prompt_logprobs == 0
