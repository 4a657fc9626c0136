"""vLLM and SGLang as they come, without this project: the peers of the rollout benchmarks.

Runs in the engine's job environment, alone, and answers requests over its standard streams. vLLM is
an `AsyncLLM` in this process. SGLang is its HTTP server, which gets a whole batch with one call;
only its start is borrowed, since on a CPU it needs stand-ins for kernels.
"""

import asyncio
import json
import os
import sys
import time
import urllib.request

import psutil

ANSWER = "ANSWER "
CACHE_BYTES = 2**28


class Vllm:
    """Eager, as it is in a rollout on a CPU."""

    def __init__(self, request):
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._runner = asyncio.Runner()
        length = request["max_model_len"]
        arguments = AsyncEngineArgs(
            model=request["hf_dir"],
            dtype=request["dtype"],
            max_model_len=length,
            max_num_seqs=request["max_num_sequences"],
            max_num_batched_tokens=max(request["max_prefill_tokens"], length),
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=CACHE_BYTES,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
        )

        async def start():
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self._runner.run(start())

    def sample(self, request):
        """Tokens that were sampled."""
        return self._runner.run(self._sample(request))

    async def _sample(self, request):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one(name, prompt, seed):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=request["max_new_tokens"],
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                stop_token_ids=[request["eos_token_id"]],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            tokens = {"prompt_token_ids": prompt}
            async for found in self._llm.generate(tokens, params, name):
                output = found.outputs[0]
            return len(output.token_ids)

        calls = [
            one(f"{request['turn']}/{place}/{index}", prompt, seed)
            for place, (prompt, seeds) in enumerate(request["samples"])
            for index, seed in enumerate(seeds)
        ]
        return sum(await asyncio.gather(*calls))


class Sglang:
    """Its server, as it is in a rollout on a CPU."""

    def __init__(self, request):
        from engines.rollout.sglang.server import start

        arguments = {
            "model_path": request["hf_dir"],
            "dtype": request["dtype"],
            "device": "cpu",
            "sampling_backend": "pytorch",
            "sampling_defaults": "openai",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "context_length": request["max_model_len"] + 8,
            "max_running_requests": request["max_num_sequences"],
            "max_total_tokens": request["max_num_cached_tokens"],
            "max_prefill_tokens": request["max_prefill_tokens"],
            "chunked_prefill_size": request["max_prefill_tokens"],
            "skip_server_warmup": True,
            "sleep_on_idle": True,
            "log_level": "warning",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
        }
        environment = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_PLUGINS": "none",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        self._server = start(arguments, environment)

    def sample(self, request):
        """Tokens that were sampled."""
        rows = [(prompt, seed) for prompt, seeds in request["samples"] for seed in seeds]
        body = {
            "input_ids": [prompt for prompt, _ in rows],
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": [
                {
                    "max_new_tokens": request["max_new_tokens"],
                    "temperature": 1.0,
                    "stop_token_ids": [request["eos_token_id"]],
                    "skip_special_tokens": False,
                    "no_stop_trim": True,
                    "sampling_seed": seed,
                }
                for _, seed in rows
            ],
        }
        call = urllib.request.Request(  # noqa: S310  loopback
            f"{self._server.url}/generate",
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._server.key}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(call, timeout=600) as answer:  # noqa: S310
            return sum(len(each["output_ids"]) for each in json.load(answer))


def cpu_seconds():
    """Of this process and all below it, so far."""
    first = psutil.Process()
    times = [each.cpu_times() for each in (first, *first.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main():
    # The engine's processes write to the standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        if engine is None:
            engine = {"vllm": Vllm, "sglang": Sglang}[request["engine"]](request)
            answers.write(ANSWER + "{}\n")
            continue
        cpu, start = cpu_seconds(), time.perf_counter()
        num_tokens = engine.sample(request)
        seconds = time.perf_counter() - start
        found = {"tokens": num_tokens, "seconds": seconds, "cpu_seconds": cpu_seconds() - cpu}
        answers.write(ANSWER + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
