"""Positions of tokens among images, for the rotary embedding of a vision model."""

from typing import Any

import torch
from torch import Tensor

from engines.types import TokenBatch


def image_positions(model: Any, batch: TokenBatch, token_id: int) -> Tensor:
    """Return the positions of a packed row, (3, 1, T) int64 on the CPU: time, height, width.

    Each sequence gets the positions that `model`, a transformers model without its head, gives it
    alone, from 0. The placeholder `token_id` occurs once per image feature.
    """
    images = batch.images
    plain_T = batch.position_ids_T.cpu()
    if images is None:
        return plain_T.expand(3, 1, -1)
    # On the CPU, since `get_rope_index` loops over the images of a sequence.
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
