"""Images follow their sequences, whatever is taken from a batch and in which order."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.controller.worker_group import split_plan, take
from engines.images import ImagePatches
from engines.training.step.micro_batches import cut, filler
from engines.types import TokenBatch

WIDTH = 3
grids = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
rows = st.lists(st.lists(grids, max_size=3), min_size=1, max_size=5)


def images_of(sequences: list[list[tuple[int, int, int]]]) -> list[list[torch.Tensor]]:
    """Patches whose every value says what they belong to; some are of two sequences."""
    made: dict[tuple[int, ...], torch.Tensor] = {}
    return [
        [
            made.setdefault(
                (i // 2, k, t, h, w), torch.full((t * h * w, WIDTH), 100.0 * i + 10 * k + h)
            )
            for k, (t, h, w) in enumerate(row)
        ]
        for i, row in enumerate(sequences)
    ]


def batch_of(sequences: list[list[tuple[int, int, int]]]) -> TokenBatch:
    patches = images_of(sequences)
    return TokenBatch.from_sequences(
        [[i] * (i + 2) for i in range(len(sequences))],
        images=ImagePatches.from_sequences(
            [list(zip(*pair, strict=True)) for pair in zip(patches, sequences, strict=True)]
        ),
    )


@settings(deadline=None)
@given(sequences=rows, data=st.data())
def test_they_follow_their_sequences(
    sequences: list[list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    batch, patches = batch_of(sequences), images_of(sequences)
    chosen = data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, max_size=6))
    parts = [batch.select(chosen), *(micro.batch for micro in cut(batch, [chosen]))]
    expected = [patch for i in chosen for patch in patches[i]]
    for part in parts:
        assert part.input_ids_T.tolist() == [i for i in chosen for _ in range(i + 2)]
        if not expected:
            assert part.images is None
            continue
        assert part.images is not None
        assert torch.equal(part.images.pixel_values_PD, torch.cat(expected))
        assert len(part.images.patches) == len({float(patch[0, 0]) for patch in expected})
        assert part.images.num_images_B.tolist() == [len(sequences[i]) for i in chosen]
        assert part.images.grid_thw_I3.tolist() == [list(g) for i in chosen for g in sequences[i]]


GRID, NUM_SAMPLES, IMAGE_BYTES = (1, 32, 32), 8, 32 * 32 * 24 * 4


@pytest.fixture(scope="module")
def groups() -> TokenBatch:
    """Four prompts with an image each, parts of one tensor, and eight samples of each prompt."""
    whole = torch.randn(4 * 32 * 32, 24, generator=torch.Generator().manual_seed(1))
    shown = [[(patches, GRID)] for patches in whole.split(32 * 32) for _ in range(NUM_SAMPLES)]
    ids = [[7] * (9 + i) for i in range(len(shown))]
    return TokenBatch.from_sequences(ids, images=ImagePatches.from_sequences(shown))


def held_bytes(*batches: TokenBatch) -> int:
    """Of the patches that these hold between them, each storage once."""
    tensors = [each for b in batches if b.images is not None for each in b.images.patches]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_eight_samples_of_one_image_hold_one_image(groups: TokenBatch) -> None:
    first = groups.select(range(NUM_SAMPLES))
    assert held_bytes(first) == IMAGE_BYTES
    assert held_bytes(groups) == held_bytes(groups, first, groups.select([31])) == 4 * IMAGE_BYTES
    assert held_bytes(groups.select([3, 3, 2])) == IMAGE_BYTES
    micro_batches = [each.batch for each in cut(first, [[3, 1], [0, 2, 4], [5], [6], [7]])]
    assert held_bytes(*micro_batches) == IMAGE_BYTES


def test_what_is_sent_has_its_own_images_once(groups: TokenBatch) -> None:
    plan = split_plan(groups, 3)
    assert sorted(i for part in plan for i in part) == list(range(32))
    for part in (*plan, range(32), [9], [5, 30, 4, 31]):
        sent, num_images = take(groups, part), len({i // NUM_SAMPLES for i in part})
        data = pickle.dumps(sent)  # as ranks are sent what they are called with
        assert num_images * IMAGE_BYTES < len(data) < num_images * IMAGE_BYTES + 12_000
        received = pickle.loads(data)
        assert held_bytes(received) == num_images * IMAGE_BYTES
        assert torch.equal(received.images.pixel_values_PD, sent.images.pixel_values_PD)


def test_other_views_of_a_batch_keep_them() -> None:
    batch = batch_of([[(1, 2, 2)], []])
    assert batch.with_columns(loss_mask=torch.ones(5)).images is batch.images
    moved = batch.to("cpu").images
    assert moved is not None
    assert batch.images is not None
    assert torch.equal(moved.pixel_values_PD, batch.images.pixel_values_PD)
    assert filler(batch).batch.images is not None
    assert filler(batch.select([1])).batch.images is None


def test_wrong_shapes_are_refused() -> None:
    patches, grids_U3, index_I = (torch.ones(4, 3),), torch.tensor([[1, 2, 2]]), torch.tensor([0])
    counts = torch.tensor([1, 0])
    ImagePatches(patches, grids_U3, index_I, counts)
    wide = (patches[0], torch.ones(4, 2))
    for wrong, problem in (
        (((patches[0][:3],), grids_U3, index_I, counts), r"grids have \[4\] patches, .*3, 3"),
        ((patches, grids_U3, index_I, torch.tensor([1, 1])), "sums to 2, places are 1"),
        ((patches, grids_U3[0], index_I, counts), "need"),
        ((wide, grids_U3[[0, 0]], torch.tensor([0, 1]), torch.tensor([1, 1])), "the same D"),
        ((patches, grids_U3, index_I + 1, counts), r"names \[1\] of 1"),
        ((patches * 2, grids_U3[[0, 0]], index_I, counts), r"names \[0\] of 2"),
        (((), grids_U3[:0], index_I[:0], torch.tensor([0, 0])), "a batch without images has None"),
    ):
        with pytest.raises(ValueError, match=problem):
            ImagePatches(*wrong)
    with pytest.raises(ValueError, match="images are of 2 sequences, the batch has 1"):
        TokenBatch(
            torch.zeros(3, dtype=torch.int64),
            torch.tensor([0, 3], dtype=torch.int32),
            images=ImagePatches(patches, grids_U3, index_I, counts),
        )
