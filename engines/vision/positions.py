"""Positions of tokens among images: what a model that sees gives its rotary embedding.

Promises: of each sequence those that the model gives it alone, from 0 on; of text the plain ones.
"""

from typing import Any

import torch
from torch import Tensor

from engines.types import TokenBatch


def image_positions(model: Any, batch: TokenBatch, token_id: int) -> Tensor:
    """Positions of a packed row.

    Args:
        model: of transformers, without its head; it has `get_rope_index`.
        batch: the sequences with their images.
        token_id: of the placeholder that stands once for each image feature.

    Returns:
        (3, 1, T) int64 on the CPU: along time, height and width.
    """
    images = batch.images
    plain_T = batch.position_ids_T.cpu()
    if images is None:
        return plain_T.expand(3, 1, -1)
    # On the host: the model walks through a sequence's images one by one.
    counts = images.num_images_B.tolist()
    grids = images.grid_thw_I3.cpu().split(counts)
    lengths = batch.lengths_B.tolist()
    ids = batch.input_ids_T.cpu().split(lengths)
    rows = list(plain_T.expand(3, 1, -1).split(lengths, dim=2))
    for i, count in enumerate(counts):
        if count:
            row = ids[i].unsqueeze(0)
            rows[i], _ = model.get_rope_index(
                row, mm_token_type_ids=(row == token_id).int(), image_grid_thw=grids[i]
            )
    return torch.cat(rows, dim=2)
