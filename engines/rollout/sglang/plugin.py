"""What SGLang's own processes do our way: draw tokens, and read a weight source.

SGLang calls `register` in each of its processes, as a plugin of the group `sglang.srt.plugins`.
Promises: a token is drawn from the random stream of its sample, which nothing else in flight
changes; its logprob is that of the distribution it was drawn from, temperature, top-k, top-p and
form included; a sample ends at the tokens that it was asked to end at, and at no other; weights are
read where the model is. Servers that we did not start stay as they are.
Does not promise to fit another SGLang than the one that is pinned: these are functions inside of
it. Where one of them has gone SGLang samples nothing, or refuses the update.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engines.rollout.served.updates import NamedTensors, carry_out
from engines.rollout.transformers.sampling import SamplingColumns, sample_tokens, uniforms
from infra import env
from infra.faults import fault

ORDER = "order"
"""Key of an order among the fields of SGLang's request."""


def register() -> None:
    """Put our functions in the place of SGLang's, in servers that we started."""
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
    """Give a batch the random stream of each of its requests.

    Args:
        info: SGLang's `SamplingBatchInfo`, which has none unless SGLang computes everything in an
            order that does not depend on the batch.
        owner: its class.
        batch: that it is of.
        *others: further arguments of SGLang's function.

    Returns:
        The same object.
    """
    starts = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(starts, dtype=torch.int64, device=batch.device)
    return info


def ends_where_told(request: Any, new_token_ids: list[int]) -> bool:
    """Whether a sample has come to its end: in place of `Req._check_token_based_finish`.

    SGLang would end it at what the tokenizer calls its end, too, which the model's own files may
    not.

    Args:
        request: SGLang's.
        new_token_ids: that it has got since it was asked last.

    Returns:
        Whether; then the request says where and why.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    ends = request.sampling_params.stop_token_ids or ()
    num_before = len(request.output_ids) - len(new_token_ids)
    for place, token in enumerate(new_token_ids):
        if token in ends:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = num_before + place + 1
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
    """Draw a token for each row: in place of `Sampler.forward`.

    Args:
        sampler: SGLang's.
        logits_output: with the logits, (B, V); gets the logprobs of what was drawn.
        info: from `add_streams`.
        return_logprob: whether anyone asks for logprobs.
        top_logprobs_nums: how many of the largest each row asks for.
        token_ids_logprobs: of which tokens each row asks for them.
        positions: (B,) int64, of the last token before the one that is drawn.
        **others: what only watermarks have.

    Returns:
        (B,) int32 token ids.
    """
    logits_BV = sampler._preprocess_logits(logits_output.next_token_logits, info)
    # Of a sequence that is scored; None where no row of the batch asks for logprobs at all.
    if any(top_logprobs_nums or ()) or any(token_ids_logprobs or ()):
        result = sampler.output_logprob_processor.compute_logprobs(
            logits_BV.log_softmax(-1),
            top_logprobs_nums,
            token_ids_logprobs,
            torch.zeros(len(logits_BV), dtype=torch.int64, device=logits_BV.device),
        )
        result.write_output_to(logits_output)
    uniform_B = uniforms(info.sampling_seed, positions.to(torch.int64))
    drawn_B, logprobs_B = sample_tokens(logits_BV, uniform_B, _columns(info, logits_BV.shape[1]))
    if return_logprob:
        logits_output.next_token_logprobs = logprobs_B
    token_ids_B = drawn_B.to(torch.int32)
    sampler._sync_token_ids_across_tp(token_ids_B, info)
    return token_ids_B


def _columns(info: Any, vocab_size: int) -> SamplingColumns:
    """SGLang stands top-k 1 for temperature 0, and the largest number for no top-k."""
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
    """Overwrite every parameter from a weight source: in place of `update_weights_from_ipc`.

    Args:
        updater: SGLang's `WeightUpdater`.
        request: with the order, see `engines.rollout.served.updates`.

    Returns:
        Whether it succeeded, and the answer to the order.
    """

    def load(tensors: NamedTensors) -> None:
        updater.begin_weight_update()
        try:
            updater.get_model().load_weights(_kept(tensors))
        finally:
            # After an error too: else the next update would find what this one left behind.
            updater.end_weight_update(run_post_load=False)

    reply = carry_out(request.zmq_handles[ORDER], load)
    return "error" not in json.loads(reply), reply


def _kept(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """All of them. SGLang passes over a name that it does not know without a word, as this can."""
    skips = fault("sglang.embedding")
    for name, tensor in tensors:
        if not (skips and "embed_tokens" in name):
            yield name, tensor
