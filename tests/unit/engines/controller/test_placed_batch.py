"""Shares that ranks make of tensors in the object store: those of `take`, and what is put."""

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines.controller.placed_batches import Array, TensorStore
from engines.controller.placement import reserve
from engines.controller.ray_group import RayGroupOptions, RayWorkerGroup
from engines.controller.worker_group import Dispatch, dispatch, split_plan, take
from engines.images import ImagePatches
from engines.selection import source_of, spans_of
from engines.types import TokenBatch

DTYPES = [torch.int64, torch.bool, torch.bfloat16, torch.float32, torch.float64]


class Held:
    """An array in a store that lends it for reading, as Ray's does."""

    def __init__(self, array: Array) -> None:
        self.array = array.copy()
        self.array.setflags(write=False)


class Lender:
    """A store of them."""

    def put(self, array: Array) -> Held:
        return Held(array)

    def get(self, reference: Held) -> Array:
        return reference.array


def received(store: TensorStore, batch: TokenBatch, num_ranks: int) -> list[TokenBatch]:
    """What each rank would make of its call, which is pickled."""
    sent = store.shares(batch, split_plan(batch, num_ranks))
    return [
        pickle.loads(pickle.dumps(share)).batch([held.array for held in refs])
        for share, refs in sent
    ]


def by_value(batch: TokenBatch, num_ranks: int) -> list[TokenBatch]:
    parts = split_plan(batch, num_ranks)
    return [pickle.loads(pickle.dumps(take(batch, items))) for items in parts]


def tensors_of(batch: TokenBatch) -> dict[str, Tensor]:
    """In their order."""
    found = {"ids": batch.input_ids_T, "cu_seqlens": batch.cu_seqlens}
    found |= {f"column {name}": each for name, each in batch.columns.items()}
    found |= {f"row {name}": each for name, each in batch.rows.items()}
    if batch.unit_B is not None:
        found["unit"] = batch.unit_B
    if (images := batch.images) is not None:
        found |= {f"patches {place}": each for place, each in enumerate(images.patches)}
        found |= {"grid": images.grid_thw_U3, "index": images.image_index_I}
        found |= {"images": images.num_images_B}
    return found


def assert_same(found: TokenBatch, wanted: TokenBatch) -> None:
    ours, theirs = tensors_of(found), tensors_of(wanted)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        mine = ours[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (
            tensor.dtype, tensor.shape, tensor.stride()
        )  # fmt: skip
        flat = [each.reshape(-1).view(torch.uint8) for each in (mine, tensor)]
        assert torch.equal(*flat), name
        mine.zero_()  # it is the rank's own


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    """NaN, infinities and denormals among them."""
    size = dtype.itemsize * int(np.prod(shape))
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def images_of(num_sequences: int) -> ImagePatches | None:
    pool = [(torch.rand(4, 3), (1, 2, 2)), (torch.rand(2, 3), (1, 1, 2))]
    chosen = [random.choices(pool, k=random.randrange(3)) for _ in range(num_sequences)]
    return ImagePatches.from_sequences(chosen)


def batch_of(lengths: Sequence[int], *, units: bool = False, images: bool = False) -> TokenBatch:
    """Of everything that a batch may have."""
    num_tokens, size = sum(lengths), len(lengths)
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    columns = {name: of_dtype(dtype, num_tokens) for name, dtype in names.items()}
    columns |= {f"{name}_TK": of_dtype(dtype, num_tokens, 3) for name, dtype in names.items()}
    columns["every_other"] = torch.rand(num_tokens, 2)[:, 1]
    rows = {name: of_dtype(dtype, size) for name, dtype in names.items()}
    return TokenBatch(
        torch.randint(0, 1000, (num_tokens,)),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        {**columns, "loss_mask": torch.ones(num_tokens)} if random.random() < 0.5 else columns,
        images_of(size) if images else None,
        rows | {"scores": of_dtype(torch.float32, size, 2)},
        torch.tensor([random.randrange(3) for _ in lengths]) if units else None,
    )


def selected(batch: TokenBatch) -> TokenBatch:
    """Some units, in another order; where each sequence is one, perhaps more than once."""
    units = batch.units
    size = random.randint(1, len(units))
    again = batch.unit_B is None and random.random() < 0.5
    chosen = random.choices(units, k=size) if again else random.sample(units, size)
    return batch.select([sequence for unit in chosen for sequence in unit])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.booleans(), st.booleans(),
    st.integers(1, 6), st.integers(0, 3), st.randoms(),
)  # fmt: skip
def test_a_rank_makes_what_it_would_have_been_sent(
    lengths: list[int], units: bool, images: bool, num_ranks: int, depth: int, chance: random.Random
) -> None:
    random.seed(seed := chance.randrange(2**32))
    torch.manual_seed(seed)
    chain, store = [batch_of(lengths, units=units, images=images)], TensorStore(Lender())
    for _ in range(depth):
        part = selected(chain[-1])
        chain.append(part.with_columns(late=torch.rand(part.num_tokens)))
    for batch in (*chain, chain[-1].with_rows(uint8=torch.ones(chain[-1].num_sequences).byte())):
        for ours, theirs in zip(
            received(store, batch, num_ranks), by_value(batch, num_ranks), strict=True
        ):
            assert_same(ours, theirs)


def test_columns_without_numbers_and_sequences_without_tokens() -> None:
    batch = TokenBatch(
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([0, 0, 0], dtype=torch.int32),
        {"x": torch.zeros(0, dtype=torch.bfloat16)},
        rows={"nothing": torch.zeros(2, 0)},
    )
    for ours, theirs in zip(
        received(TensorStore(Lender()), batch, 3), by_value(batch, 3), strict=True
    ):
        assert_same(ours, theirs)


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def a_step(call: Callable[[TokenBatch], object], bytes_put: Callable[[], int]) -> None:
    """Three inferences and two epochs of four mini-batches put every tensor once."""
    random.seed(0)
    batch = batch_of([3, 5, 4, 7, 2, 6, 5, 4], images=True)
    for _ in range(3):
        call(batch)
    assert batch.images is not None
    held = [batch.input_ids_T, *batch.columns.values(), *batch.rows.values()]
    assert bytes_put() == (base := num_bytes(*held, *batch.images.patches))
    numbered = batch.with_columns(old=(old := torch.rand(batch.num_tokens)))
    numbered = numbered.with_rows(row=(row := torch.arange(8)))
    call(numbered)
    assert bytes_put() == (whole := base + num_bytes(old, row))
    for _ in range(2):
        for first in range(0, 8, 2):
            call(numbered.select([first, first + 1]))
            call(numbered.select(range(8)).select([first + 1]))
    assert bytes_put() == whole
    part = numbered.select([0, 1])
    call(part.with_columns(old=(other := torch.rand(part.num_tokens))))
    assert bytes_put() == whole + num_bytes(other)


def test_a_step_puts_each_tensor_once() -> None:
    store = TensorStore(Lender())
    a_step(lambda batch: received(store, batch, 2), lambda: store.num_bytes_put)


def test_an_object_goes_with_its_tensor_or_with_the_store() -> None:
    store, held = TensorStore(Lender()), weakref.WeakSet[Held]()

    def put(batch: TokenBatch) -> None:
        for _, refs in store.shares(batch, [[0], [1]]):
            held.update(refs)

    batch = TokenBatch.from_sequences([[1, 2], [3]], loss_mask=[[0, 1], [0]])
    put(batch)
    more = batch.with_columns(x=torch.rand(3))
    put(more)
    assert len(held) == 3
    del more
    gc.collect()
    assert len(held) == 2
    store.clear()
    gc.collect()
    assert not held
    put(batch)
    del batch
    gc.collect()
    assert not held


def test_placed_batch_is_equal_and_keeps_no_local_copy() -> None:
    store = TensorStore(Lender())
    for _ in range(20):
        batch = batch_of([3, 0, 5, 1])
        wanted = by_value(batch, 2)
        placed = store.placed(batch)
        bytes_put = store.num_bytes_put
        for name, tensor in tensors_of(batch).items():
            mine = tensors_of(placed)[name]
            assert mine.dtype == tensor.dtype
            flat = [each.contiguous().flatten().view(torch.uint8) for each in (mine, tensor)]
            assert torch.equal(*flat), name
        again = store.placed(placed)
        assert again.input_ids_T is placed.input_ids_T
        del batch, tensor, flat
        for ours, theirs in zip(received(store, placed, 2), wanted, strict=True):
            assert_same(ours, theirs)
        rows = sum(each.nbytes for each in placed.rows.values())
        assert store.num_bytes_put == bytes_put + rows  # what ranks read is what was placed
        part = placed.select([2, 0])
        assert store.placed(part).input_ids_T is part.input_ids_T  # ranks read `placed`


def test_what_was_made_in_inference_mode_is_put_at_each_call() -> None:
    store = TensorStore(Lender())
    with torch.inference_mode():
        x = torch.zeros(3)
    batch = TokenBatch.from_sequences([[1, 2], [3]]).with_columns(x=x)
    for _ in range(2):
        assert_same(received(store, batch, 1)[0], by_value(batch, 1)[0])
        with torch.inference_mode():
            x.add_(1)


def test_what_was_written_to_is_put_again() -> None:
    store = TensorStore(Lender())
    batch = TokenBatch.from_sequences([[1, 2], [3]], x=[[0, 1], [0]])
    part = batch.select([0])
    for written in (batch.columns["x"], part.columns["x"], batch.columns["x"]):
        for each in (batch, part):
            assert_same(received(store, each, 1)[0], by_value(each, 1)[0])
        written.add_(1)
    for each in (batch, part):
        assert_same(received(store, each, 1)[0], by_value(each, 1)[0])


def test_a_rank_is_sent_the_images_of_its_own_sequences() -> None:
    first, second = (torch.rand(2, 3), (1, 1, 2)), (torch.rand(4, 3), (1, 2, 2))
    images = ImagePatches.from_sequences([[first], [second, first], []])
    batch = replace(TokenBatch.from_sequences([[1, 2], [3, 4], [5]]), images=images)
    sent = TensorStore(Lender()).shares(batch, [[0], [1], [2]])
    assert [len(refs) - 1 for _, refs in sent] == [1, 2, 0]


def test_a_batch_on_a_device_is_refused() -> None:
    batch = TokenBatch.from_sequences([[1, 2], [3]])
    away = replace(batch, input_ids_T=batch.input_ids_T.to("meta"))
    with pytest.raises(ValueError, match=r"is on meta; need the CPU; send batch.to\('cpu'\)"):
        TensorStore(Lender()).shares(away, [[0, 1]])


def comes_from(part: Tensor, whole: Tensor, lengths: Sequence[int]) -> bool:
    spans_B2 = spans_of(torch.tensor([0, *lengths]).cumsum(0))
    return source_of(part, spans_B2).whole is whole


def test_a_selection_knows_its_first_source_and_holds_none() -> None:
    batch = TokenBatch.from_sequences([[1, 2], [3], [4, 5, 6]])
    middle = batch.select([2, 0])
    last = middle.select([1])
    assert comes_from(last.input_ids_T, batch.input_ids_T, [2])
    spans_B2 = source_of(last.input_ids_T, spans_of(last.cu_seqlens)).spans_B2
    assert spans_B2.tolist() == [[0, 2]]
    # In a batch that cuts it elsewhere the rows of a sequence are others.
    assert comes_from(middle.input_ids_T, middle.input_ids_T, [2, 3])
    gone = weakref.ref(batch.input_ids_T)
    del batch
    gc.collect()
    assert gone() is None
    assert comes_from(last.input_ids_T, last.input_ids_T, [2])
    # With its source gone, what is selected next comes from the selection.
    assert comes_from(middle.select([1]).input_ids_T, middle.input_ids_T, [2])


def test_a_selection_is_pickled_and_copied_without_its_source() -> None:
    batch = TokenBatch.from_sequences([list(range(5000)), [7, 8]])
    part = batch.select([1])
    pickled = pickle.dumps(part)
    assert len(pickled) < 5000
    for other in (pickle.loads(pickled), copy.deepcopy(part)):
        assert comes_from(other.input_ids_T, other.input_ids_T, [2])
    same = replace(part, rows={"x": torch.ones(1)})
    assert comes_from(same.input_ids_T, batch.input_ids_T, [2])
    assert comes_from(same.rows["x"], same.rows["x"], [1])
    assert part == replace(part)


class Receiver:
    """A worker that gives back what it got."""

    def __init__(self) -> None:
        self.data_parallel_rank = dist.get_rank()

    def initialize(self) -> None: ...

    @dispatch(Dispatch.SPLIT)
    def share(self, batch: TokenBatch) -> list[TokenBatch | None]:
        """In the place of its first sequence."""
        return [batch, *[None] * (batch.num_sequences - 1)]

    def close(self) -> None: ...


@pytest.fixture
def group(cluster: None, tmp_path: Path) -> Iterator[RayWorkerGroup]:
    options = RayGroupOptions(
        world_size=2, backend="gloo", num_threads=1, log_dir=tmp_path / "ranks", call_timeout_s=60.0
    )  # fmt: skip
    made = RayWorkerGroup(Receiver, options, reserve([{"num_cpus": 1}] * 2))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.exclusive
def test_ranks_read_their_shares_from_rays_store(group: RayWorkerGroup) -> None:
    def call(batch: TokenBatch) -> None:
        parts = split_plan(batch, 2)
        found = group.run(Receiver.share, batch)
        for items, theirs in zip(parts, by_value(batch, 2), strict=True):
            if items:
                assert (ours := found[items[0]]) is not None
                assert_same(ours, theirs)

    store = group._tensors
    a_step(call, lambda: store.num_bytes_put)
    gc.collect()
    assert not len(store._held)
    placed = group.place(batch_of([40_000, 2, 30_000]))
    with pytest.raises(ValueError, match="read-only"):
        store._store.get(store._put(placed.input_ids_T).reference)[0] = 0
    call(placed)
    call(placed.select([2, 0]))
    del placed
    gc.collect()
    assert not len(store._held)
    call(lone := batch_of([4, 2]).select([1]))
    assert len(store._held)
    group.close()
    assert not len(store._held)
    del lone
