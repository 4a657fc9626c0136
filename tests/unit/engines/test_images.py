"""Images follow their sequences, whatever is taken from a batch and in which order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.images import ImagePatches
from engines.training.step.micro_batches import cut, filler
from engines.types import TokenBatch

WIDTH = 3
grids = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
rows = st.lists(st.lists(grids, max_size=3), min_size=1, max_size=5)


def images_of(sequences: list[list[tuple[int, int, int]]]) -> list[list[torch.Tensor]]:
    """Patches whose every value says which image of which sequence they belong to."""
    return [
        [torch.full((t * h * w, WIDTH), 10.0 * i + k) for k, (t, h, w) in enumerate(row)]
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
        assert part.images.num_images_B.tolist() == [len(sequences[i]) for i in chosen]
        assert part.images.grid_thw_I3.tolist() == [list(g) for i in chosen for g in sequences[i]]


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
    patches, grids_I3, counts = torch.ones(4, 3), torch.tensor([[1, 2, 2]]), torch.tensor([1, 0])
    ImagePatches(patches, grids_I3, counts)
    for wrong, problem in (
        ((patches[:3], grids_I3, counts), "grids have 4 patches, pixel_values_PD 3"),
        ((patches, grids_I3, torch.tensor([1, 1])), "sums to 2, grids are 1"),
        ((patches, grids_I3[0], counts), "need"),
        ((patches[:0], grids_I3[:0], torch.tensor([0, 0])), "a batch without images has None"),
    ):
        with pytest.raises(ValueError, match=problem):
            ImagePatches(*wrong)
    with pytest.raises(ValueError, match="images are of 2 sequences, the batch has 1"):
        TokenBatch(
            torch.zeros(3, dtype=torch.int64),
            torch.tensor([0, 3], dtype=torch.int32),
            images=ImagePatches(patches, grids_I3, counts),
        )
