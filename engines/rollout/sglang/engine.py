"""The rollout engine sglang: a server of SGLang that reads the weights in its own processes.

Promises: the contract of `engines.rollout.base`. Samples paused during an update are recomputed up
to where they stood, and each token carries the version that sampled it. Random streams are those of
the engine transformers. `close`, and the end of this process, end every process of SGLang.
Logprobs of given tokens take only earlier tokens from the prefix cache. SGLang runs on the
requested platform or not at all, downloads nothing, and reads no weights from the model directory.
A cache of `kv_cache_bytes` holds at least one sample of the whole context.
Does not promise: a quick start; `score` and `prompt_logprobs` while paused; that an aborted sample
has the tokens of its last steps.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engines.config.rollout import RolloutConfig
from engines.rollout.base import Capability, MemoryTag, SleepLevel
from engines.rollout.prompt_logprobs import PromptRequest, PromptRows, logprob_at
from engines.rollout.served.engine import RunningSample, ServedEngine
from engines.rollout.served.weight_receiver import ModelLayout, read_layout
from engines.rollout.sglang.options import NUM_HELD_BACK, SglangOptions
from engines.rollout.sglang.plugin import ORDER
from engines.rollout.sglang.sampling import GENERATE, SglangSampler, check_temperature
from engines.rollout.sglang.server import Client, Server, start
from engines.rollout.stop_strings import StopStrings
from engines.types import Completion, RolloutRequest
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.faults import fault

UPDATE = "/update_weights_from_ipc"
CPU_KV_CACHE_BYTES = 2**30
MEMORY_TAGS: dict[MemoryTag, str] = {"weights": "weights", "cache": "kv_cache"}
"""SGLang's names of what it frees asleep."""


def start_server(
    hf_dir: Path,
    options: SglangOptions,
    max_num_sequences: int,
    dtype: str,
    platform: PlatformBase,
    layout: ModelLayout,
) -> Server:
    """Start SGLang with random weights and wait until it takes requests.

    Raises:
        ConfigError: the options do not fit the model or the platform, or SGLang refuses them.
    """
    on_cpu = platform.device_name == "cpu"
    if on_cpu and layout.is_latent:
        raise ConfigError(
            "rollout.engine",
            f"got sglang; {layout.architecture} has latent attention, for which SGLang 0.5 needs "
            "kernels that the package index has for no CPU; choose transformers",
        )
    arguments = {
        **server_arguments(hf_dir, options, max_num_sequences, dtype, platform, layout),
        **options.server_args,
    }
    environment = {
        **platform.rollout_env_vars(),
        env.SGLANG_CACHE_DIR.name: (
            env.SGLANG_CACHE_DIR.get() or str(env.home() / "compiled" / "sglang")
        ),
        env.SGLANG_USE_CPU_ENGINE.name: "1" if on_cpu else None,
        env.SGLANG_PLUGINS.name: "rlhf",
        env.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.name: "0",
        # Else prompt logprobs materialize the logits of all tokens of a step.
        env.SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK.name: "1",
        env.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.name: "1",
        env.HF_HUB_OFFLINE.name: "1",
    }
    return start(arguments, environment)


def context_length(options: SglangOptions, layout: ModelLayout) -> int:
    """Return the limit of prompt and response together, in tokens."""
    return min(options.max_model_len or layout.context_length, layout.context_length)


def server_arguments(
    hf_dir: Path,
    options: SglangOptions,
    max_num_sequences: int,
    dtype: str,
    platform: PlatformBase,
    layout: ModelLayout,
) -> dict[str, Any]:
    """Return the arguments of `ServerArgs`, raise ConfigError if the cache is too small."""
    on_cpu = platform.device_name == "cpu"
    length = context_length(options, layout) + NUM_HELD_BACK
    has_tokenizer = (hf_dir / "tokenizer.json").is_file()
    return {
        "model_path": str(hf_dir),
        "json_model_override_args": f'{{"architectures": ["{layout.architecture}"]}}',
        "load_format": "dummy",
        "device": platform.device_name,
        "dtype": dtype,
        "trust_remote_code": False,
        # Else the model's sampling defaults would replace what a request leaves out.
        "sampling_defaults": "openai",
        "sampling_backend": "pytorch",
        # Only structured output needs the tokenizer.
        "skip_tokenizer_init": not has_tokenizer,
        "grammar_backend": "xgrammar" if has_tokenizer else "none",
        "random_seed": 0,
        "context_length": length,
        "max_running_requests": max_num_sequences,
        "max_total_tokens": _num_cache_tokens(hf_dir, options, dtype, on_cpu, length),
        "mem_fraction_static": options.gpu_memory_utilization,
        "max_prefill_tokens": options.max_prefill_tokens,
        "chunked_prefill_size": options.max_prefill_tokens,
        "tp_size": options.tensor_parallel_size,
        "disable_radix_cache": not options.enable_prefix_caching,
        "skip_server_warmup": True,
        # Else its scheduler uses a whole core during training.
        "sleep_on_idle": True,
        "log_level": "warning",
        **(
            {"attention_backend": "torch_native", "disable_overlap_schedule": True}
            if on_cpu
            else {"enable_memory_saver": True}
        ),
    }


def _num_cache_tokens(
    hf_dir: Path, options: SglangOptions, dtype: str, on_cpu: bool, length: int
) -> int | None:
    """Return how many tokens the cache holds; None: as many as the memory fraction allows."""
    num_bytes = options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    if num_bytes is None:
        return None
    config: Any = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    item_bytes = 4 if dtype == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * num_heads * head_dim * item_bytes
    if num_bytes < length * token_bytes:
        raise ConfigError(
            "rollout.options.kv_cache_bytes",
            f"got {num_bytes}; need {length * token_bytes}, one sample of the whole context; raise "
            "it or lower max_model_len",
        )
    return num_bytes // token_bytes


def score_body(ids: Sequence[int], temperature: float, vocab_size: int) -> dict[str, Any]:
    """Return the request body for the logprobs of given tokens.

    SGLang computes them at temperature 1; for another temperature the logprobs of the whole
    vocabulary are requested, and `scores` rescales them.
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
    """Return the request body for prompt logprobs; SGLang reports `request.first` onward."""
    return {
        "input_ids": list(request.token_ids),
        "return_logprob": True,
        "logprob_start_len": request.first - 1,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **({"top_logprobs_num": num_top} if num_top else {}),
    }


def prompt_rows(answer: Mapping[str, Any], request: PromptRequest, num_top: int) -> PromptRows:
    """Convert the answer to `prompt_body`, for the requested tokens only.

    SGLang's rows are (logprob, token, text), with no logprob for the first token.
    """
    meta, num_asked = answer["meta_info"], len(request.token_ids) - request.first
    told = meta["input_token_logprobs"][-num_asked:]
    return PromptRows(
        [row[0] for row in told],
        [[(each[0], each[1]) for each in row] for row in meta["input_top_logprobs"][-num_asked:]]
        if num_top
        else (),
    )


class SglangEngine(ServedEngine):
    """Rollout engine on SGLang; creating it starts its processes or raises a PipelineError."""

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
        self._server = start_server(
            hf_dir, options, rollout.max_num_sequences, dtype, platform, layout
        )
        self._client = Client(self._server)
        self._sampler = SglangSampler(self._client, layout.eos_token_ids)
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
            stop_strings,
            context_length(options, layout),
            rollout.max_num_sequences,
        )

    @property
    def _is_lost(self) -> bool:
        return self._server.is_lost

    async def _sample(self, sample: RunningSample) -> Completion:
        return await self._sampler.sample(sample)

    def _check_request(self, request: RolloutRequest) -> None:
        check_temperature(request)

    async def _load(self, order: str) -> Sequence[str]:
        # Always paused: an abandoned sample may still run in SGLang, which clears no cache
        # while one runs.
        await self._stop_sampling()
        body = {"zmq_handles": {ORDER: order}, "flush_cache": not fault("sglang.cache_flush")}
        answer = await self._client.call(UPDATE, body, (200, 400))
        if not self._paused and not self._sleeping:
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
        body = prompt_body(request, num_top)
        return prompt_rows(await self._client.call(GENERATE, body), request, num_top)

    async def _stop_sampling(self) -> None:
        self._sampler.may_send.clear()
        await self._client.call("/pause_generation", {"mode": "retract"})
        await self._ask()  # the scheduler answers after its last step

    async def _go_on_sampling(self) -> None:
        await self._client.call("/continue_generation", {})
        self._sampler.may_send.set()

    async def _abort(self, names: Sequence[str]) -> None:
        await self._sampler.abort(names)

    async def _free(self, level: SleepLevel) -> None:
        if self._frees_memory:
            await self._stop_sampling()
            tags = [*MEMORY_TAGS.values()] if level == "weights" else [MEMORY_TAGS["cache"]]
            await self._client.call("/release_memory_occupation", {"tags": tags})

    async def _take_back(self, tags: Collection[MemoryTag], *, samples: bool) -> None:
        if self._frees_memory:
            names = [MEMORY_TAGS[tag] for tag in tags]
            await self._client.call("/resume_memory_occupation", {"tags": names})
        if samples:
            await self._go_on_sampling()

    async def _ask(self) -> None:
        await self._client.call("/server_info")

    async def _end(self) -> None:
        await self._sampler.close()
        await self._client.close()
        self._server.stop()
