"""Steps of pairs, laid out as awkwardly as a batch may be."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from engines.types import TokenBatch

Size = tuple[int, int, int]
"""Of a pair: prompt tokens, trained tokens of the chosen answer, and of the rejected one."""


@pytest.fixture(scope="session")
def make_pairs() -> Callable[..., TokenBatch]:
    """`make_pairs(sizes, seed)`: the pairs of a step with all that a loss may read, in float64.

    Units have numbers in no order, and the sequences of one lie apart. Answers have two tokens
    that are not trained on: one inside, one at the end.
    """

    def make(sizes: Sequence[Size], seed: int = 0) -> TokenBatch:
        source = random.Random(seed)
        numbers = source.sample(range(100), len(sizes))
        sequences = [
            (number, float(chosen), size[0], size[1] if chosen else size[2])
            for number, size in zip(numbers, sizes, strict=True)
            for chosen in (True, False)
        ]
        source.shuffle(sequences)
        masks = [
            [0.0] * prompt + [1.0] * min(trained, 1) + [0.0] + [1.0] * max(trained - 1, 0) + [0.0]
            for _, _, prompt, trained in sequences
        ]
        batch = TokenBatch.from_sequences(
            [[source.randrange(3, 30) for _ in mask] for mask in masks], loss_mask=masks
        )
        batch = TokenBatch(
            batch.input_ids_T,
            batch.cu_seqlens,
            batch.columns,
            unit_B=torch.tensor([number for number, *_ in sequences]),
        )
        generator = torch.Generator().manual_seed(seed)

        def drawn(size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        return batch.with_columns(ref_logprobs=-3 * drawn(batch.num_tokens).abs()).with_rows(
            chosen=torch.tensor([chosen for _, chosen, *_ in sequences]),
            margin=drawn(batch.num_sequences).abs(),
            mismatch_log_ratio=drawn(batch.num_sequences) + 0.3,
        )

    return make
