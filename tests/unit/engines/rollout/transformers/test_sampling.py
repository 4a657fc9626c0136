"""The random streams against SplitMix64's published numbers; the draws against the softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from engines.rollout.transformers.sampling import (
    SamplingColumns,
    filter_logits,
    sample_tokens,
    stream_starts,
    uniforms,
)

SPLITMIX64_OF_1234567 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""The generator's first outputs for seed 1234567, as its reference implementation prints them."""


def columns(num_rows: int, temperature=1.0, top_k=0, top_p=1.0) -> SamplingColumns:
    return SamplingColumns(
        torch.full((num_rows,), float(temperature), dtype=torch.float64),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), float(top_p), dtype=torch.float64),
        any_greedy=temperature == 0,
        any_filter=top_k > 0 or top_p < 1,
    )


def mix_of_integers(x: int) -> int:
    """SplitMix64's output function on Python integers."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def chi_square(counts_V: torch.Tensor, probabilities_V: torch.Tensor) -> float:
    expected_V = probabilities_V * counts_V.sum()
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


def test_uniforms_are_the_published_splitmix64_numbers() -> None:
    start_B = torch.full((5,), 1234567)
    expected = [(number >> 11) / 2**53 for number in SPLITMIX64_OF_1234567]
    assert uniforms(start_B, torch.arange(5)).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_a_uniform_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    start = mix_of_integers(seed)
    number = mix_of_integers((start + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)
    starts_B = stream_starts([5, seed, 9])
    drawn = uniforms(starts_B, torch.tensor([1, index, 2]))
    assert float(drawn[1]) == (number >> 11) / 2**53


def test_seeds_one_increment_apart_do_not_share_a_stream() -> None:
    gamma = 0x9E3779B97F4A7C15
    starts_B = stream_starts([1, 1 + gamma])
    index = torch.arange(64)
    first, second = (set(uniforms(start.expand(64), index).tolist()) for start in starts_B)
    assert not first & second


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform(along: str) -> None:
    count = 40_000
    zeros = torch.zeros(count, dtype=torch.int64)
    if along == "seeds":
        drawn = uniforms(stream_starts(range(count)), zeros)
    else:
        drawn = uniforms(stream_starts([3]).expand(count), torch.arange(count))
    counts = torch.histc(drawn, bins=32, min=0, max=1)
    assert chi_square(counts, torch.full((32,), 1 / 32)) < 61.1  # 31 degrees, p = 0.001
    lag_correlation = float(torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1])
    assert abs(lag_correlation) < 0.02  # 4 standard errors


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits_V = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5, 0.0, 1.5])
    count = 40_000
    uniform_B = uniforms(stream_starts(range(count)), torch.full((count,), 4))
    logits_BV = logits_V.expand(count, -1)
    ids_B, logprobs_B = sample_tokens(logits_BV, uniform_B, columns(count, temperature))
    probabilities_V = (logits_V / temperature).softmax(-1)
    counts_V = torch.bincount(ids_B, minlength=8).float()
    assert chi_square(counts_V, probabilities_V) < 24.3  # 7 degrees, p = 0.001
    torch.testing.assert_close(logprobs_B, probabilities_V.log()[ids_B])


def test_filtered_draws_follow_the_filtered_softmax() -> None:
    logits_V = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5, 0.0, 1.5])
    count = 20_000
    uniform_B = uniforms(stream_starts(range(count)), torch.zeros(count, dtype=torch.int64))
    ids_B, logprobs_B = sample_tokens(logits_V.expand(count, -1), uniform_B, columns(count, 1.0, 3))
    kept = torch.tensor([0, 3, 7])
    probabilities = logits_V[kept].softmax(-1)
    counts_V = torch.bincount(ids_B, minlength=8).float()
    assert int(counts_V.sum() - counts_V[kept].sum()) == 0
    assert chi_square(counts_V[kept], probabilities) < 13.8  # 2 degrees, p = 0.001
    for token, probability in zip(kept.tolist(), probabilities, strict=True):
        torch.testing.assert_close(
            logprobs_B[ids_B == token][0], probability.log(), atol=1e-6, rtol=0
        )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(
        st.tuples(st.integers(0, 14), st.floats(0.05, 1.0), st.floats(0.2, 3.0)),
        min_size=1,
        max_size=5,
    ),
)
def test_filters_agree_with_transformers_warpers(seed, rows) -> None:
    logits_BV = torch.randn((len(rows), 12), generator=torch.Generator().manual_seed(seed)) * 3
    temperature_B = torch.tensor([row[2] for row in rows])
    logits_BV = logits_BV / temperature_B[:, None]
    ours_BV = filter_logits(
        logits_BV,
        torch.tensor([row[0] for row in rows]),
        torch.tensor([row[1] for row in rows], dtype=torch.float64),
    )
    for row, (top_k, top_p, _) in enumerate(rows):
        expected_1V = logits_BV[row : row + 1].clone()
        if top_k:
            expected_1V = TopKLogitsWarper(top_k)(None, expected_1V)
        if top_p < 1:
            expected_1V = TopPLogitsWarper(top_p)(None, expected_1V)
        assert torch.equal(ours_BV[row], expected_1V[0])


def test_top_k_keeps_ties() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    kept_BV = filter_logits(logits_BV, torch.tensor([2]), torch.tensor([1.0])).isfinite()
    assert kept_BV.tolist() == [[False, True, True, True, False]]


def test_each_row_has_its_own_parameters() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(4, -1)
    mixed = SamplingColumns(
        torch.tensor([0.0, 1.0, 1.0, 2.0]),
        torch.tensor([1, 1, 0, 0]),
        torch.tensor([0.1, 1.0, 0.3, 1.0]),
        any_greedy=True,
        any_filter=True,
    )
    ids_B, logprobs_B = sample_tokens(logits_BV, torch.zeros(4, dtype=torch.float64), mixed)
    assert ids_B.tolist() == [3, 3, 3, 0]
    softmax = torch.tensor([0.0, 1.0, 2.0, 3.0]).softmax(-1)
    half = torch.tensor([0.0, 0.5, 1.0, 1.5]).softmax(-1)
    expected = torch.stack([softmax[3].log(), torch.tensor(0.0), torch.tensor(0.0), half[0].log()])
    torch.testing.assert_close(logprobs_B, expected, atol=1e-6, rtol=1e-5)


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits_BV = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform_B = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    ids_B, _ = sample_tokens(logits_BV, uniform_B, columns(2))
    assert ids_B.tolist() == [1, 2]


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = torch.randn((10, 16), generator=torch.Generator().manual_seed(0))
    uniform_B = uniforms(stream_starts(range(10)), torch.arange(10))
    whole = sample_tokens(logits_BV, uniform_B, columns(10, 0.8, 5, 0.9))
    monkeypatch.setattr("engines.rollout.transformers.sampling.MAX_CHUNK_ELEMENTS", 48)
    parts = sample_tokens(logits_BV, uniform_B, columns(10, 0.8, 5, 0.9))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_a_row_with_nan_reports_nan() -> None:
    logits_BV = torch.tensor([[torch.nan, 0.0], [0.0, 0.0]])
    _, logprobs_B = sample_tokens(logits_BV, torch.full((2,), 0.5, dtype=torch.float64), columns(2))
    assert logprobs_B.isnan().tolist() == [True, False]
