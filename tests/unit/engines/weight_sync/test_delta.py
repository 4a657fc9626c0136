"""The difference of two buckets, and the bases that two ends keep."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.errors import WeightSyncError
from engines.weight_sync.delta import BLOCK_BYTES, DeltaBases, apply, encode, num_bytes_sent

N = 64 * BLOCK_BYTES


def as_base(bucket: Tensor) -> Tensor:
    return torch.cat([bucket, bucket.new_zeros(-bucket.numel() % BLOCK_BYTES)])


def rebuilt(bucket: Tensor, base: Tensor) -> Tensor:
    encoded = encode(bucket, as_base(base))
    if encoded is None:
        return bucket
    parts, sizes = encoded
    assert parts.numel() == num_bytes_sent(bucket.numel(), sizes) < bucket.numel()
    target = as_base(base)
    apply(parts, sizes, target)
    assert not target[bucket.numel() :].any()
    return target[: bucket.numel()]


def drawn(num_bytes: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=draw)


@st.composite
def pairs(draw) -> tuple[Tensor, Tensor]:
    """A bucket of any length, and one that differs in any bytes, by any amounts."""
    num_bytes = draw(st.integers(0, 6 * BLOCK_BYTES))
    base = drawn(num_bytes, draw(st.integers(0, 99)))
    bucket = base.clone()
    places = st.integers(0, max(num_bytes - 1, 0))
    for start, end, by in draw(st.lists(st.tuples(places, places, st.integers(1, 255)))):
        bucket[start : end + 1] ^= by
    return bucket, base


@settings(max_examples=300, deadline=None)
@example((torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)))
@example((drawn(1, 1), drawn(1, 2)))
@given(pairs())
def test_any_bytes_are_rebuilt_bitwise(pair: tuple[Tensor, Tensor]) -> None:
    bucket, base = pair
    assert torch.equal(rebuilt(bucket, base), bucket)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_payloads_and_signed_zeros_are_rebuilt(dtype: torch.dtype) -> None:
    base = torch.zeros(512, dtype=dtype)
    bucket = base.clone()
    bucket[3], bucket[70], bucket[200] = -0.0, float("nan"), float("-inf")
    odd = bucket.view(torch.uint8)
    odd[71 * dtype.itemsize - 2] |= 1  # a NaN whose payload is not the usual one
    assert torch.equal(rebuilt(odd, base.view(torch.uint8)), odd)
    assert torch.equal(rebuilt(base.view(torch.uint8), odd), base.view(torch.uint8))


def test_unchanged_bytes_become_a_128th() -> None:
    encoded = encode(drawn(N), drawn(N))
    assert encoded is not None
    assert (encoded[0].numel(), encoded[1]) == (N // 128, (0, 0))
    assert not encoded[0].any()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.3])
def test_size_follows_the_share_of_changed_words(share: float) -> None:
    base = drawn(64 * N)
    words = base.clone().view(torch.int16)
    draw = torch.Generator().manual_seed(1)
    changed = torch.randperm(words.numel(), generator=draw)[: int(share * words.numel())]
    words[changed] ^= 1
    encoded = encode(words.view(torch.uint8), base)
    assert encoded is not None
    limit = share + min(share / 2, 1 / 16) + 1 / 128
    assert encoded[1][0] == len(changed)
    assert 0.9 * limit < encoded[0].numel() / base.numel() <= limit


def test_a_difference_that_saves_nothing_is_not_sent() -> None:
    base = drawn(N)
    assert encode(base ^ 255, base) is None


def test_a_small_step_changes_few_bfloat16_words() -> None:
    """The figure of the concepts page: AdamW at a learning rate of 1e-6."""
    draw = torch.Generator().manual_seed(0)
    start = (torch.randn(2**18, generator=draw) * 0.02).bfloat16()
    weight = torch.nn.Parameter(start.float())
    optimizer = torch.optim.AdamW([weight], lr=1e-6)
    sent = [start.view(torch.uint8)]
    shares: list[float] = []
    for _ in range(10):
        weight.grad = torch.randn(2**18, generator=draw)
        optimizer.step()
        sent.append(weight.detach().bfloat16().view(torch.uint8))
        encoded = encode(sent[-1], sent[-2])
        assert encoded is not None
        shares.append(encoded[0].numel() / sent[-1].numel())
    assert min(shares) > 0.02
    assert max(shares) < 0.045


def ends() -> tuple[DeltaBases, DeltaBases]:
    return DeltaBases("xxh3"), DeltaBases("xxh3")


def pass_on(sender: DeltaBases, reader: DeltaBases, *buckets: Tensor) -> int:
    """Send buckets; returns the number of bytes that crossed."""
    num_bytes = 0
    for bucket in buckets:
        parts, sizes = sender.encode(0, bucket)
        there = torch.full_like(bucket, 7) if sizes else parts.clone()
        reader.rebuild(0, parts.clone(), sizes, there)
        assert torch.equal(there, bucket)
        num_bytes += parts.numel()
    sent, found = sender.finish(), reader.finish()
    assert sent == found != ""
    sender.confirm(found)
    return num_bytes


def test_only_the_first_transfer_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sender, reader = ends()
    first, second = drawn(N), drawn(N - 5, seed=1)
    assert pass_on(sender, reader, first, second) == 2 * N - 5
    first[9] += 1
    assert pass_on(sender, reader, first, second) == 2 * N // 128 + 3
    assert pass_on(sender, reader, first) == N // 128
    # Bases of the transfer before the last are forgotten.
    assert pass_on(sender, reader, first, second) == N // 128 + N - 5
    assert caplog.messages == [
        f"delta sync sent {num_sent} of {num_bytes} bytes"
        for num_sent, num_bytes in (
            (2 * N - 5, 2 * N - 5),
            (2 * N // 128 + 3, 2 * N - 5),
            (N // 128, N),
            (N // 128 + N - 5, 2 * N - 5),
        )
    ]


def test_a_bucket_of_another_size_is_sent_whole() -> None:
    sender, reader = ends()
    pass_on(sender, reader, drawn(N))
    longer = drawn(N + 1)
    assert pass_on(sender, reader, longer) == N + 1
    assert pass_on(sender, reader, longer) == N // 128 + 1


def test_another_base_gives_another_digest() -> None:
    sender, reader = ends()
    bucket = drawn(N)
    pass_on(sender, reader, bucket)
    reader._bases[0][0][5] ^= 1
    parts, sizes = sender.encode(0, bucket)
    reader.rebuild(0, parts, sizes, torch.empty_like(bucket))
    sender.finish()
    with pytest.raises(WeightSyncError, match="a rollout engine rebuilt"):
        sender.confirm(reader.finish())
    assert sender.confirmed == ""
