"""Hooks inside SGLang's processes: token sampling and weight loading.

SGLang calls `register` in each of its processes, as a plugin of the group `sglang.srt.plugins`.
Promises: a token is sampled from the random stream of its sample, whatever else is in flight; its
logprob is that of the sampled distribution; only the requested tokens end a sample early. Servers
that we did not start are unchanged.
The hooks replace internal functions of the pinned SGLang version; where one is missing, SGLang
samples nothing or refuses the update.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engines.rollout.served.weight_receiver import NamedTensors, carry_out
from engines.rollout.transformers.sampling import SamplingColumns, sample_tokens, uniforms
from infra import env
from infra.faults import fault

ORDER = "order"
"""Key of the order in SGLang's update request."""


def register() -> None:
    """Install the hooks, in servers that we started."""
    if env.RLHF_SGLANG_KEY.get() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function, kind in (
        ("layers.sampler.Sampler.forward", draw, HookType.REPLACE),
        (
            "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            add_streams,
            HookType.AFTER,
        ),
        (
            "managers.schedule_batch.Req._check_token_based_finish",
            ends_where_told,
            HookType.REPLACE,
        ),
        (
            "model_executor.model_runner_components.weight_updater.WeightUpdater"
            ".update_weights_from_ipc",
            receive_weights,
            HookType.REPLACE,
        ),
    ):
        HookRegistry.register(f"sglang.srt.{target}", function, kind)


def add_streams(info: Any, owner: type, batch: Any, *others: object) -> Any:
    """Give a `SamplingBatchInfo` the random stream of each request, which SGLang leaves unset."""
    info.sampling_seed = torch.tensor(
        [request.sampling_params.sampling_seed or 0 for request in batch.reqs],
        dtype=torch.int64,
        device=batch.device,
    )
    return info


def ends_where_told(request: Any, new_token_ids: list[int]) -> bool:
    """Replace `Req._check_token_based_finish`: return True and mark the request if it has ended.

    SGLang would also stop at the tokenizer's end token, which the model's files may not name.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    ends = request.sampling_params.stop_token_ids or ()
    for number, token in enumerate(new_token_ids, 1 + len(request.output_ids) - len(new_token_ids)):
        if token in ends:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = number
            return True
    return False


def draw(
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: Tensor,
    **others: object,
) -> Tensor:
    """Replace `Sampler.forward`: sample one token per row; return (B,) int32 ids.

    Args:
        logits_output: holds the (B, V) logits; receives the logprobs.
        top_logprobs_nums: number of likeliest tokens that each row asks for.
        token_ids_logprobs: tokens whose logprobs each row asks for.
        positions: (B,) int64, of the last token before the sampled one.
    """
    logits_BV = sampler._preprocess_logits(logits_output.next_token_logits, info)
    # For sequences that are scored; both lists are None if no row of the batch is.
    if any(top_logprobs_nums or ()) or any(token_ids_logprobs or ()):
        sampler.output_logprob_processor.compute_logprobs(
            logits_BV.log_softmax(-1),
            top_logprobs_nums,
            token_ids_logprobs,
            torch.zeros(len(logits_BV), dtype=torch.int64, device=logits_BV.device),
        ).write_output_to(logits_output)
    uniform_B = uniforms(info.sampling_seed, positions.to(torch.int64))
    drawn_B, logprobs_B = sample_tokens(logits_BV, uniform_B, _columns(info, logits_BV.shape[1]))
    if return_logprob:
        logits_output.next_token_logprobs = logprobs_B
    token_ids_B = drawn_B.to(torch.int32)
    sampler._sync_token_ids_across_tp(token_ids_B, info)
    return token_ids_B


def _columns(info: Any, vocab_size: int) -> SamplingColumns:
    """Convert SGLang's encoding: temperature 0 is top-k 1, no top-k is the largest number."""
    top_k_B = info.top_ks.to(torch.int64)
    greedy_B = top_k_B == 1
    return SamplingColumns(
        temperature_B=torch.where(greedy_B, 0.0, info.temperatures.view(-1).double()),
        top_k_B=torch.where(top_k_B >= vocab_size, 0, top_k_B),
        top_p_B=info.top_ps.double(),
        any_greedy=bool(info.is_any_greedy),
        any_filter=bool(info.need_top_k_sampling or info.need_top_p_sampling),
    )


def receive_weights(updater: Any, request: Any) -> tuple[bool, str]:
    """Replace `update_weights_from_ipc`: load a weight source; return success and the reply."""

    def load(tensors: NamedTensors) -> None:
        updater.begin_weight_update()
        try:
            updater.get_model().load_weights(_kept(tensors))
        finally:
            # After an error too: else the next update would find leftovers of this one.
            updater.end_weight_update(run_post_load=False)

    reply = carry_out(request.zmq_handles[ORDER], load)
    return "error" not in json.loads(reply), reply


def _kept(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Pass all tensors on; a fault test drops the embedding, as SGLang drops unknown names."""
    skips = fault("sglang.embedding")
    for name, tensor in tensors:
        if not (skips and "embed_tokens" in name):
            yield name, tensor
