"""Both attention steps against the textbook formula, row by row, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch

from engines.errors import RolloutError
from engines.rollout.transformers.attention import DecodeStep, PrefillStep, attend
from engines.rollout.transformers.kv_cache import KVCache

HEADS, KV_HEADS, WIDTH = 6, 2, 4
SCALING = 0.37


def textbook(query_HTD, key_GLD, value_GLD, offset: int) -> torch.Tensor:
    """softmax(q k^T) v, one head and one token at a time; token t sees positions <= offset + t."""
    out = torch.empty(query_HTD.shape[1], HEADS, WIDTH)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for token in range(query_HTD.shape[1]):
            seen = offset + token + 1
            scores = (key_GLD[group, :seen] * query_HTD[head, token]).sum(-1) * SCALING
            weights = scores.exp() / scores.exp().sum()
            out[token, head] = (weights[:, None] * value_GLD[group, :seen]).sum(0)
    return out


def test_prefill_then_decode_equals_the_formula():
    torch.manual_seed(0)
    lengths, num_samples = [3, 1, 5], [1, 2, 2]
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = KVCache(max_rows=8, max_length=16)
    cache.reserve(5, 5)
    step = PrefillStep.build(cache, 0, lengths, num_samples, torch.device("cpu"))
    assert step.position_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert step.last_P.tolist() == [2, 3, 8]
    out = step.attend(0, query, key, value, SCALING)[0]
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = textbook(query[0, :, part], key[0, :, part], value[0, :, part], offset=0)
        torch.testing.assert_close(out[part], expected)
        start += length

    row_lengths = torch.tensor([3, 1, 1, 5, 5])
    cache.reserve(5, 6)
    query, new_key, new_value = (
        torch.randn(5, heads, 1, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    decode = DecodeStep(cache, row_lengths, length=6)
    out = decode.attend(0, query, new_key, new_value, SCALING)
    for row, (length, start) in enumerate(zip(row_lengths.tolist(), [0, 3, 3, 4, 4], strict=True)):
        part = slice(start, start + length)
        keys = torch.cat([key[0, :, part], new_key[row]], dim=1)
        values = torch.cat([value[0, :, part], new_value[row]], dim=1)
        expected = textbook(query[row], keys, values, offset=length)
        torch.testing.assert_close(out[row], expected)


class Layer(torch.nn.Module):
    """An attention layer of some model."""

    layer_idx = 0


def test_a_model_that_drops_the_step_is_refused():
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(RolloutError, match="does not pass rollout_step"):
        attend(Layer(), x, x, x, None)


def test_attention_it_does_not_compute_is_refused():
    x = torch.zeros(1, 2, 1, 4)
    step = DecodeStep(KVCache(1, 8), torch.tensor([0]), 1)
    with pytest.raises(RolloutError, match="softcap"):
        attend(Layer(), x, x, x, None, rollout_step=step, softcap=30.0)


def test_a_model_that_drops_its_window_is_refused():
    layer = Layer()
    layer.config = SimpleNamespace(sliding_window=4, layer_types=["sliding_attention"])
    x = torch.zeros(1, 2, 1, 4)
    step = DecodeStep(KVCache(1, 8), torch.tensor([0]), 1)
    with pytest.raises(RolloutError, match="does not pass its window"):
        attend(layer, x, x, x, None, rollout_step=step)
