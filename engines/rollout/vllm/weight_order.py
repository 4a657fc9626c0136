"""What vLLM's workers are told about an update, and what they answer; both travel as JSON."""

import json
from collections.abc import Sequence

from engines.errors import WeightSyncError
from engines.rollout.vllm.model_layout import ModelLayout
from engines.weight_sync.base import Receipt, WeightSource
from engines.weight_sync.wire import source_to_json


def order_of(source: WeightSource, layout: ModelLayout, dtype: str) -> str:
    """The argument of `WorkerExtension.receive_weights`."""
    return json.dumps(
        {
            "source": source_to_json(source),
            "shapes": layout.tensors,
            "tied": sorted(layout.tied),
            "dtype": dtype,
        }
    )


def agreed(replies: Sequence[str]) -> Receipt:
    """The receipt that all workers gave; an error of one is the error of the update."""
    receipts: set[Receipt] = set()
    for reply in map(json.loads, replies):
        if "error" in reply:
            raise WeightSyncError(reply["error"])
        receipts.add(Receipt(**reply))
    if len(receipts) != 1:
        raise WeightSyncError(f"vLLM's workers hold {len(receipts)} different sets of weights")
    return receipts.pop()
