"""The rollout engine sglang: a server of SGLang that reads the weights in its own processes.

Promises: the contract of `engines.rollout.base`. Samples paused during an update are recomputed up
to where they stood, and each token carries the version that sampled it. Random streams are those of
the engine transformers. `close`, and the end of this process, end every process of SGLang.
Logprobs of given tokens are computed without the prefix cache.
Does not promise: a quick start; `score` and `prompt_logprobs` while paused; that an aborted sample
has the tokens of its last steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.config.rollout import RolloutConfig
from engines.rollout.base import Capability, SleepLevel
from engines.rollout.prompt_logprobs import PromptRequest, PromptRows, logprob_at
from engines.rollout.served.engine import ServedEngine
from engines.rollout.served.weight_receiver import read_layout
from engines.rollout.sglang import launch
from engines.rollout.sglang.options import SglangOptions
from engines.rollout.sglang.plugin import ORDER
from engines.rollout.sglang.sampling import GENERATE, SglangSampler, check_temperature
from engines.rollout.sglang.server import Client
from engines.rollout.stop_strings import StopStrings
from engines.types import RolloutRequest
from hardware.base import PlatformBase
from infra.faults import fault

UPDATE = "/update_weights_from_ipc"
TAGS = {"kv": ["kv_cache"], "weights": ["kv_cache", "weights"]}


def score_body(ids: Sequence[int], temperature: float, vocab_size: int) -> dict[str, Any]:
    """Return the request body for the logprobs of given tokens.

    SGLang computes them at temperature 1; for others those of the whole vocabulary are requested
    and rescaled by `scores`.
    """
    return {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **({} if temperature == 1 else {"token_ids_logprob": list(range(vocab_size))}),
    }


def scores(answer: Mapping[str, Any], ids: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return the logprob of every token but the first, from the answer to `score_body`."""
    meta = answer["meta_info"]
    if temperature == 1:
        return tuple(row[0] for row in meta["input_token_logprobs"][1:])
    return tuple(
        logprob_at([each[0] for each in row], token, temperature)
        for row, token in zip(meta["input_token_ids_logprobs"][1:], ids[1:], strict=True)
    )


def prompt_body(request: PromptRequest, num_top: int) -> dict[str, Any]:
    """Return the request body for prompt logprobs, answered after position `logprob_start_len`."""
    return {
        "input_ids": list(request.token_ids),
        "return_logprob": True,
        "logprob_start_len": request.first - 1,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **({"top_logprobs_num": num_top} if num_top else {}),
    }


def prompt_rows(answer: Mapping[str, Any], request: PromptRequest, num_top: int) -> PromptRows:
    """Return what the answer to `prompt_body` reports for the tokens that a request asks about.

    SGLang's rows are (logprob, token, text), with no logprob for the first token.
    """
    meta, num_asked = answer["meta_info"], len(request.token_ids) - request.first
    told = meta["input_token_logprobs"][-num_asked:]
    if not num_top:
        return PromptRows([row[0] for row in told])
    tops = meta["input_top_logprobs"][-num_asked:]
    return PromptRows(
        [row[0] for row in told], [[(each[0], each[1]) for each in row] for row in tops]
    )


class SglangEngine(ServedEngine):
    """Rollout engine on SGLang; creating it starts its processes or raises ConfigError."""

    capabilities = frozenset(
        {
            Capability.SHARED_MEMORY,
            Capability.EXACT_CONTINUATION,
            Capability.PROMPT_LOGPROBS,
        }
    )

    def __init__(
        self, hf_dir: Path, rollout: RolloutConfig, dtype: str, platform: PlatformBase
    ) -> None:
        options = SglangOptions.model_validate(rollout.options)
        layout = read_layout(hf_dir, "sglang", dtype)
        stop_strings = StopStrings(hf_dir)
        self._frees_memory = platform.device_name != "cpu"
        self._server = launch.start_server(hf_dir, rollout, dtype, platform, layout)
        self._client = Client(self._server)
        self._sglang_sampler = SglangSampler(self._server, self._client, layout.eos_token_ids)
        own = {
            Capability.PREFIX_CACHE: options.enable_prefix_caching,
            Capability.STRUCTURED_OUTPUT: stop_strings.has_tokenizer,
            Capability.SLEEP_FREES_MEMORY: self._frees_memory,
        }
        # Set per instance: they depend on the options and the platform.
        self.capabilities = SglangEngine.capabilities | {c for c, has in own.items() if has}  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(
            "SGLang",
            layout,
            dtype,
            rollout.timeout_s,
            self._sglang_sampler,
            stop_strings,
            launch.context_length(options, layout),
            rollout.max_num_sequences,
        )

    def _check_request(self, request: RolloutRequest) -> None:
        check_temperature(request)

    async def _load(self, order: str) -> Sequence[str]:
        # Always paused: an abandoned sample may still run in SGLang, which clears no cache
        # while one runs.
        await self._stop_sampling()
        body = {"zmq_handles": {ORDER: order}, "flush_cache": not fault("sglang.cache_flush")}
        answer = await self._client.call(UPDATE, body, (200, 400))
        if not self._paused:
            await self._go_on_sampling()
        return [answer["message"]]

    async def _name_version(self, version: int) -> None:
        await self._client.call(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    async def _score(self, ids: Sequence[int], temperature: float) -> tuple[float, ...]:
        body = score_body(ids, temperature, self._layout.vocab_size)
        return scores(await self._client.call(GENERATE, body), ids, temperature)

    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        answer = await self._client.call(GENERATE, prompt_body(request, num_top))
        return prompt_rows(answer, request, num_top)

    async def _stop_sampling(self) -> None:
        self._sglang_sampler.may_send.clear()
        await self._client.call("/pause_generation", {"mode": "retract"})
        await self._ask()  # the scheduler answers after its last step

    async def _go_on_sampling(self) -> None:
        await self._client.call("/continue_generation", {})
        self._sglang_sampler.may_send.set()

    async def _abort(self, names: Sequence[str]) -> None:
        await self._sglang_sampler.abort(names)

    async def _free(self, level: SleepLevel) -> None:
        if self._frees_memory:
            await self._stop_sampling()
            await self._client.call("/release_memory_occupation", {"tags": TAGS[level]})

    async def _take_back(self, level: SleepLevel) -> None:
        if self._frees_memory:
            await self._client.call("/resume_memory_occupation", {"tags": TAGS[level]})
            await self._go_on_sampling()

    async def _ask(self) -> None:
        await self._client.call("/server_info")

    async def _end(self) -> None:
        await self._sglang_sampler.close()
        await self._client.close()
        self._server.stop()
