"""What of the engine sglang can be told without SGLang; the rest is its contract."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from transformers import Gemma3TextConfig, MistralConfig, PretrainedConfig, Qwen3Config

from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.engine import RunningSample
from engines.rollout.served.weight_receiver import ModelLayout, read_layout
from engines.rollout.sglang.engine import (
    NUM_HELD_BACK,
    prompt_body,
    prompt_rows,
    score_body,
    scores,
    server_arguments,
)
from engines.rollout.sglang.options import SglangOptions
from engines.rollout.sglang.plugin import ends_where_told
from engines.rollout.sglang.sampling import (
    batch_body,
    check_temperature,
    completion,
    stream_start,
)
from engines.rollout.sglang.server import _events
from engines.rollout.sglang.server_main import check_window
from engines.rollout.transformers.sampling import stream_starts, uniforms
from engines.types import Completion, RolloutRequest, SamplingParams, StructuredOutput
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

LOCKS = Path(__file__).resolve().parents[5] / "infra/locks/cpu"
EOS = frozenset({3})
REQUEST = RolloutRequest("a", (5, 6), SamplingParams(2), (1,))


def pins(name: str) -> dict[str, str]:
    lines = (LOCKS / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def sample(request: RolloutRequest = REQUEST, **changes) -> RunningSample:
    return RunningSample(request, 0, 0, "0/0/a/", **changes)


def span(version: str, start: int, end: int) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def answer(token_ids: tuple[int, ...] = (7, 8), **meta) -> dict[str, object]:
    found = {
        "output_token_logprobs": [[-0.5 - n, t, None] for n, t in enumerate(token_ids)],
        "weight_versions": [span("3", 0, 1), span("4", 1, len(token_ids))],
        "finish_reason": {"type": "length", "length": len(token_ids)},
    }
    return {"output_ids": list(token_ids), "meta_info": {**found, **meta}}


def test_engine_environment_matches_ray_without_control_plane() -> None:
    own, core = pins("sglang.lock"), pins("core.lock")
    for package in ("ray", "xxhash", "pytest"):
        assert own[package] == core[package]
    assert own["torch"].endswith("+cpu")
    absent = {
        "prefect",
        "mlflow",
        "torchvision",
        "torchaudio",
        "sglang-kernel",
        "flashinfer-python",
    }
    assert not absent & own.keys()
    assert not [n for n in own if n.startswith(("nvidia-", "cuda-")) and n != "nvidia-ml-py"]
    assert ROLLOUT_ENGINES.place("sglang").environment == "sglang"


@pytest.mark.parametrize("name", ["load_format", "api_key", "sampling_backend"])
def test_an_argument_on_which_the_contract_stands_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        SglangOptions(server_args={name: "auto"})
    assert SglangOptions(server_args={"page_size": 16}).server_args == {"page_size": 16}


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 1, 2**63 - 1, -1])
def test_positions_of_sglang_lead_to_the_numbers_of_the_stream(seed: int) -> None:
    plain = RolloutRequest("a", (5, 6, 7), SamplingParams(9), (seed,))
    prefixed = replace(plain, prefixes=((8, 9),))
    offset = replace(plain, prompt_ids=(5, 6, 7, 8, 9), draw_offsets=(2,))
    start = stream_starts([seed])
    for request, first_draw in ((plain, 0), (prefixed, 2), (offset, 2)):
        running = sample(request)
        for k in range(3):
            position = torch.tensor([len(running.token_ids) - 1 + k])
            found = uniforms(torch.tensor([stream_start(running)]), position)
            assert found == uniforms(start, torch.tensor([first_draw + k]))


def test_a_request_says_all_that_sglang_would_fill_in() -> None:
    sampling = SamplingParams(9, 0.7, top_p=0.9, top_k=5, stop_token_ids=(11,))
    request = replace(REQUEST, sampling=sampling, prefixes=((8, 9),))
    body = batch_body([sample(request), sample()], EOS)
    assert body["input_ids"] == [[5, 6, 8, 9], [5, 6]]
    params, others = body["sampling_params"]
    assert (params["max_new_tokens"], params["stop_token_ids"]) == (7, [3, 11])
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, 5)
    assert others["top_k"] == -1
    json.dumps(body)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (StructuredOutput(json_schema="{}"), {"json_schema": "{}"}),
        (StructuredOutput(regex="a+"), {"regex": "a+"}),
        (StructuredOutput(choice=("a.", "b")), {"regex": r"(a\.)|(b)"}),
    ],
)
def test_forms(form: StructuredOutput, expected: dict[str, str]) -> None:
    request = replace(REQUEST, sampling=SamplingParams(2, structured_output=form))
    (params,) = batch_body([sample(request)], EOS)["sampling_params"]
    assert expected.items() <= params.items()


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 5.0])
def test_temperatures_that_sglang_keeps(temperature: float) -> None:
    check_temperature(replace(REQUEST, sampling=SamplingParams(2, temperature)))


def test_a_temperature_that_sglang_would_change_is_refused() -> None:
    with pytest.raises(RolloutError, match="temperature is 1e-07; .* use 0, or 1e-05 and more"):
        check_temperature(replace(REQUEST, sampling=SamplingParams(2, 1e-7)))


def test_each_token_gets_the_version_of_its_span() -> None:
    found = completion(sample(), answer(), EOS)
    assert found == Completion("a", 0, (7, 8), (-0.5, -1.5), (3, 4), "length")


def test_a_stop_string_cuts_what_sglang_sampled_beyond_it() -> None:
    found = completion(sample(num_until_stop=1), answer(finish_reason=None), EOS)
    assert found == Completion("a", 0, (7,), (-0.5,), (3,), "stop")


def test_the_one_token_of_top_k_1_is_certain() -> None:
    request = replace(REQUEST, sampling=SamplingParams(2, 0.7, top_k=1))
    assert completion(sample(request), answer(), EOS).logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": None},
        {"weight_versions": None},
        {"weight_versions": [span("3", 0, 1)]},
        {"finish_reason": {"type": "stop", "matched": 8}},
        {"finish_reason": {"type": "abort", "message": "out of memory"}},
    ],
    ids=str,
)
def test_a_completion_that_is_not_whole_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RolloutError, match="0/0/a/"):
        completion(sample(), answer(**changes), EOS)


def test_a_sample_that_sglang_cut_short_is_refused() -> None:
    with pytest.raises(RolloutError, match="ended it after 1 tokens"):
        completion(sample(), answer((7,), weight_versions=[span("3", 0, 1)]), EOS)


def test_an_abort_before_the_first_token_is_an_empty_completion() -> None:
    nothing = answer((), weight_versions=[], finish_reason={"type": "abort", "message": ""})
    aborted = sample(aborted=True)
    assert completion(aborted, nothing, EOS) == aborted.empty()


def test_sglang_scores_at_other_temperatures_use_full_vocabulary() -> None:
    ids, logprobs = (0, 2, 1), torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]]).log()
    assert "token_ids_logprob" not in score_body(ids, 1.0, 3)
    assert score_body(ids, 0.7, 3)["token_ids_logprob"] == [0, 1, 2]
    given = [
        None,
        *([float(row[token]), token, None] for row, token in zip(logprobs, ids[1:], strict=True)),
    ]
    rows = [None, *([[float(p), i, None] for i, p in enumerate(row)] for row in logprobs)]
    found = {"meta_info": {"input_token_logprobs": given, "input_token_ids_logprobs": rows}}
    for temperature in (1.0, 0.7):
        scaled = (logprobs / temperature).log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(scaled, ids[1:], strict=True)]
        assert scores(found, ids, temperature) == pytest.approx(expected, abs=1e-6)


def test_events_are_put_together_however_they_are_cut() -> None:
    text = b'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'

    async def chunks(size: int):
        for start in range(0, len(text), size):
            yield text[start : start + size]

    async def read(size: int):
        return [event async for event in _events(chunks(size))]

    for size in (1, 7, len(text)):
        assert asyncio.run(read(size)) == [{"a": 1}, {"a": 2}]


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    Qwen3Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, intermediate_size=48, max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def arguments(hf_dir: Path, **options) -> dict[str, object]:
    layout: ModelLayout = read_layout(hf_dir, "sglang", "float32")
    chosen = SglangOptions(**options)
    return server_arguments(hf_dir, chosen, 4, "float32", CPUPlatform(), layout)


def test_kv_cache_size_follows_its_bytes_and_fits_one_sample(hf_dir: Path) -> None:
    token_bytes = 2 * 2 * 1 * 32 * 4
    given = arguments(hf_dir, kv_cache_bytes=100 * token_bytes, max_model_len=40)
    assert (given["max_total_tokens"], given["context_length"]) == (100, 40 + NUM_HELD_BACK)
    assert given["skip_tokenizer_init"] is True
    assert "api_key" not in given
    with pytest.raises(ConfigError, match=r"options.kv_cache_bytes: got 512; need .*; raise it or"):
        arguments(hf_dir, kv_cache_bytes=token_bytes)


@pytest.mark.parametrize(
    ("new", "ending"), [([4, 7], None), ([7, 3, 5], (3, 4)), ([5], (5, 3)), ([2], None)]
)
def test_sample_ends_at_its_stop_tokens_not_at_tokenizer_eos(
    monkeypatch: pytest.MonkeyPatch, new: list[int], ending: tuple[int, int] | None
) -> None:
    module = ModuleType("sglang.srt.managers.schedule_batch")
    module.FINISH_MATCHED_TOKEN = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(stop_token_ids={3, 5}),
        tokenizer=SimpleNamespace(eos_token_id=2),
        output_ids=[9, 9, *new],
        finished_reason=None,
        finished_len=None,
    )
    assert ends_where_told(request, new) is (ending is not None)
    if ending is not None:
        assert (request.finished_reason.matched, request.finished_len) == ending


class Windowed:
    """What SGLang has of a model whose window it keeps to."""

    def get_attention_sliding_window_size(self) -> int:
        return 7


FULL = ["full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "context_length", "model_class", "is_refused"),
    [
        (MistralConfig(sliding_window=8), 9, object, True),
        (MistralConfig(sliding_window=8), 8, object, False),
        (MistralConfig(sliding_window=8), 9, Windowed, False),
        (MistralConfig(sliding_window=None), 9, object, False),
        (Qwen3Config(), 9, object, False),
        (Gemma3TextConfig(sliding_window=8), 9, object, True),
        (Gemma3TextConfig(sliding_window=8, num_hidden_layers=2, layer_types=FULL), 9, object,
         False),
    ],
)  # fmt: skip
def test_a_window_that_sglang_would_pass_over_is_refused(
    tmp_path: Path,
    config: PretrainedConfig,
    context_length: int,
    model_class: type[object],
    is_refused: bool,
) -> None:
    config.save_pretrained(tmp_path)
    asked: list[str] = []

    def class_of(name: str) -> type[object]:
        asked.append(name)
        return model_class

    if not is_refused:
        check_window(tmp_path, context_length, class_of)
        return
    with pytest.raises(ValueError, match=r"ForCausalLM without its sliding window of 8 tokens"):
        check_window(tmp_path, context_length, class_of)
    assert asked in (["MistralForCausalLM"], ["Gemma3ForCausalLM"])


def test_stand_ins_are_found_and_cannot_be_called() -> None:
    code = """
from engines.rollout.sglang.server_main import install
install(); install()
from sgl_kernel import some_kernel
from torchvision.transforms.functional import resize
from torchvision.transforms import InterpolationMode
assert InterpolationMode.BICUBIC is not None
from transformers.utils.import_utils import is_torchvision_available
assert not is_torchvision_available()
try:
    some_kernel(1)
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "sgl_kernel.some_kernel is a stand-in: it has no build for a CPU\n"


def test_sglang_scores_a_prompt_from_one_token_before_the_range() -> None:
    request = PromptRequest("a", (5, 6, 7, 8), 2, num_top=2)
    body = prompt_body(request, 2)
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (1, 2)
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["input_ids"] == [5, 6, 7, 8]
    # Of token 6, where it begins to look, SGLang says nothing.
    meta = {
        "input_token_logprobs": [[None, 6, None], [-2.0, 7, None], [-0.5, 8, None]],
        "input_top_logprobs": [
            None,
            [[-1.0, 3, None], [-1.5, 9, None]],
            [[-0.5, 8, None], [-2.5, 4, None]],
        ],
    }
    found = prompt_rows({"meta_info": meta}, request, 2)
    assert found.logprobs == [-2.0, -0.5]
    assert found.likeliest == [[(-1.0, 3), (-1.5, 9)], [(-0.5, 8), (-2.5, 4)]]


def test_of_the_tokens_alone_sglang_is_asked_for_no_others() -> None:
    request = PromptRequest("a", (5, 6, 7), 1)
    assert "top_logprobs_num" not in prompt_body(request, 0)
    meta = {"input_token_logprobs": [[None, 5, None], [-2.0, 6, None], [-0.5, 7, None]]}
    found = prompt_rows({"meta_info": meta}, request, 0)
    assert (found.logprobs, found.likeliest) == ([-2.0, -0.5], ())
