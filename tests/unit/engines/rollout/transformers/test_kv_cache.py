"""The cache against plain tensors that are concatenated step by step."""

import torch

from engines.rollout.transformers.kv_cache import LENGTH_STEP, KVCache

HEADS, WIDTH = 2, 3


def random_kv(num_rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, HEADS, length, WIDTH)
    # Values may be wider than keys.
    return torch.randn(shape, generator=generator), torch.randn(
        (*shape[:3], WIDTH + 1), generator=generator
    )


def test_rows_of_different_lengths_grow_in_place() -> None:
    cache = KVCache(max_rows=8, max_length=200)
    cache.reserve(2, 5)
    keys, values = random_kv(2, 5, seed=0)
    for layer in range(2):
        cache.write_prefixes(layer, 0, keys + layer, values + layer)
    position_B = torch.tensor([5, 3])  # row 1 holds a prompt of 3, padded to 5
    new_keys, new_values = random_kv(2, 1, seed=1)
    slots = None
    for layer in range(2):
        cache.reserve(2, 6)
        slots = cache.slots(position_B, HEADS)
        k, v = cache.append(layer, new_keys + layer, new_values + layer, slots, 6)
        torch.testing.assert_close(k[0], torch.cat([keys[0], new_keys[0]], 1) + layer)
        torch.testing.assert_close(v[1, :, :3], values[1, :, :3] + layer)
        torch.testing.assert_close(v[1, :, 3], new_values[1, :, 0] + layer)


def test_growth_keeps_what_is_stored() -> None:
    cache = KVCache(max_rows=100, max_length=1000)
    cache.reserve(2, 4)
    keys, values = random_kv(2, 4, seed=2)
    cache.write_prefixes(0, 0, keys, values)
    cache.reserve(50, 10 * LENGTH_STEP)
    ((k, v),) = cache.read_row(1, 4)
    assert torch.equal(k[0], keys[1])
    assert torch.equal(v[0], values[1])
    assert cache.length >= 10 * LENGTH_STEP


def test_growth_is_geometric_and_limited() -> None:
    cache = KVCache(max_rows=10, max_length=10 * LENGTH_STEP)
    cache.reserve(8, 8 * LENGTH_STEP)
    cache.reserve(9, 8 * LENGTH_STEP + 1)
    cache.write_prefixes(0, 0, *random_kv(9, 1, seed=3))
    assert cache.length == 10 * LENGTH_STEP
    assert cache.size_bytes == 10 * HEADS * 10 * LENGTH_STEP * (2 * WIDTH + 1) * 4


def test_move_copies_rows_and_free_drops_everything() -> None:
    cache = KVCache(max_rows=4, max_length=64)
    cache.reserve(4, 3)
    keys, values = random_kv(4, 3, seed=4)
    cache.write_prefixes(0, 0, keys, values)
    cache.move([3, 2], [0, 1], length=3)
    for row, source in enumerate([3, 2]):
        ((k, v),) = cache.read_row(row, 3)
        assert torch.equal(k[0], keys[source])
        assert torch.equal(v[0], values[source])
    cache.free()
    assert cache.size_bytes == 0
    assert cache.length == 0
