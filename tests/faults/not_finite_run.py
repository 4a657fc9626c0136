"""One of two FSDP2 ranks whose steps are spoiled by a number that is not finite, in every way."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rlhf.testing.context import share
from rlhf.testing.killed import SharedStore
from rlhf.testing.launch import launch
from rlhf.testing.plain_loop import make_batch
from rlhf.testing.tiny_models import write_tiny_models
from sharded_run import NUM_RANKS, be_rank

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.errors import NonFiniteError
from engines.training.base import BaseEngine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

VALUES = (math.nan, math.inf, -math.inf)
PLACES = ("loss", "gradient", "reward", "logprob")
SPOILED = [*product(VALUES, PLACES, range(NUM_RANKS))]


def results(root: Path) -> list[dict[str, Any]]:
    """What each of the ranks saw.

    Args:
        root: an empty directory.
    """
    write_tiny_models(root)
    launch([__file__, f"--root={root}"], NUM_RANKS, root, 240.0)
    return [json.loads((root / f"seen-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


class Spoiled:
    """The policy's loss with one number of it spoiled."""

    def __init__(self, value: float, place: str, is_here: bool) -> None:
        self._inner = policy_loss_fn(AlgorithmConfig(), max_new_tokens=24)
        self._value, self._place = value, place if is_here else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        factor_T = torch.ones(batch.num_tokens)
        factor_T[int(batch.columns["loss_mask"].nonzero()[0])] = self._value
        if self._place == "reward":
            advantages_T = batch.columns["advantages"] * factor_T
            batch = batch.with_columns(advantages=advantages_T)
        if self._place == "logprob":
            outputs = ModelOutputs(outputs.logprobs_T * factor_T, outputs.entropy_T)
        if self._place == "gradient":
            outputs.logprobs_T.register_hook(lambda grad_T: grad_T * factor_T)
        output = self._inner(outputs, batch, counts)
        if self._place == "loss":
            return LossOutput(output.loss * self._value, output.metrics, output.maxima)
        return output


def batch_of(step: int) -> TokenBatch:
    """Every sequence is trained on."""
    batch = make_batch(step)
    mask_T = torch.ones(batch.num_tokens)
    mask_T[batch.cu_seqlens[:-1]] = 0.0
    return batch.with_columns(
        loss_mask=mask_T,
        advantages=mask_T * 0.7,
        old_logprobs=torch.full((batch.num_tokens,), -2.9),
    )


def play(engine: BaseEngine, store: SharedStore, root: Path) -> None:
    """One good step, each way to spoil one, one good step."""

    def step(loss_fn: Callable[..., LossOutput]) -> None:
        """As a trainer does: what was trained is saved."""
        engine.train_batch(share(engine, batch_of(engine.num_steps)), loss_fn)
        store.save(engine.num_steps)

    step(Spoiled(1.0, "loss", is_here=True))
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    stopped = []
    for value, place, rank in SPOILED:
        try:
            step(Spoiled(value, place, engine.rank == rank))
        except NonFiniteError as error:
            stopped.append(f"{value} {place} {rank}: {error}")
    found = {
        "stopped": stopped,
        "num_steps": engine.num_steps,
        "unchanged": all(torch.equal(t, before[name]) for name, t in engine.get_per_tensor_param()),
        "saved": sorted(path.name for path in (root / "steps").glob("*")),
    }
    step(Spoiled(1.0, "loss", is_here=True))
    found["goes_on"] = engine.num_steps
    (root / f"seen-{engine.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    be_rank(play)
