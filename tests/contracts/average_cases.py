"""The moving average of a backend's weights, as a case that runs on every rank.

torch's own `AveragedModel`, over the whole weights that the engine streams after each step, is the
reference; the engine keeps only its own parts.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from rlhf.testing.context import WITH_ENTROPY, Context, loss_fn, share, train
from rlhf.testing.plain_loop import NUM_STEPS, make_batch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engines import collectives
from engines.config.training import EmaConfig
from engines.errors import NonFiniteError
from engines.training.base import BaseEngine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from infra.errors import ConfigError

EMA = EmaConfig(decay=0.7, use_warmup=False)


class Weights(nn.Module):
    """Whole weights as a module."""

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__()
        self.whole = nn.ParameterList(tensor for _, tensor in streamed(engine).items())


def streamed(engine: BaseEngine) -> dict[str, Tensor]:
    """A copy of the weights, whole. Collective."""
    return {name: tensor.clone().cpu() for name, tensor in engine.get_per_tensor_param()}


def case_average(context: Context) -> dict[str, Any]:
    """Against torch's, with spoiled updates between; saved, continued, adopted, taken elsewhere.

    A backend that keeps none refuses to be made with one.
    """
    try:
        engine = context.engine(ema=EMA)
    except ConfigError as error:
        if "ema" in context.claims:
            raise
        return {"refused": str(error)}
    torchs = AveragedModel(Weights(engine), multi_avg_fn=get_ema_multi_avg_fn(EMA.decay))
    torchs.update_parameters(Weights(engine))  # the first one is copied
    num_own = sum(average.numel() for _, average in engine._averaged())
    results: dict[str, Any] = {
        "claimed": "ema" in context.claims,
        "share": num_own / sum(tensor.numel() for tensor in torchs.module.parameters()),
        "steps": averaged_steps(engine, torchs, range(2)),
    }
    own = context.root / f"averaged-{context.layout.name}"
    if context.rank == 0:
        own.mkdir()
    collectives.barrier()
    engine.save_checkpoint(own, step=2)
    at_two = adopted(context, context.layout.name)
    results["after_two"] = difference(at_two, torchs)
    results["steps"] += averaged_steps(engine, torchs, range(2, NUM_STEPS))
    results["adopts"] = [engine.adopt_average(), engine.adopt_average()]
    final = streamed(engine)
    results["at_the_end"] = difference(final, torchs)
    resumed = context.engine(load=False, ema=EMA)
    resumed.load_checkpoint(own)
    train(resumed, range(2, NUM_STEPS))
    resumed.adopt_average()
    results["resumed_is_equal"] = are_equal(streamed(resumed), final)
    results["begins_anew"] = begun_anew(context, resumed)
    if context.rank == 0:
        save_file(at_two, context.root / f"average-{context.layout.name}.safetensors")
    for name, world_size in (("alone", 1), ("data2", 2)):
        if context.layout.model == "qwen3" and context.layout.world_size > world_size:
            stored = load_file(context.root / f"average-{name}.safetensors")
            results[f"from-{name}"] = are_equal(adopted(context, name), stored)
    return results


def averaged_steps(engine: BaseEngine, torchs: AveragedModel, steps: range) -> list[list[float]]:
    """Steps of both, each behind one that is left out."""
    rows = []
    for step in steps:
        try:
            engine.train_batch(share(engine, make_batch(step)), spoiled)
        except NonFiniteError:
            rows += train(engine, range(step, step + 1))
        torchs.update_parameters(Weights(engine))
    return rows


def spoiled(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """A loss that is no number."""
    output = loss_fn(outputs, batch, counts)
    return LossOutput(output.loss * math.nan, output.metrics, output.maxima)


spoiled.readouts = WITH_ENTROPY


def adopted(context: Context, name: str) -> dict[str, Tensor]:
    """The average in the checkpoint of a layout."""
    engine = context.engine(load=False, ema=EMA)
    engine.load_checkpoint(context.root / f"averaged-{name}")
    assert engine.adopt_average()
    return streamed(engine)


def begun_anew(context: Context, averaged: BaseEngine) -> bool:
    """Whether the average of an engine that goes on from an adopted one begins with its weights."""
    path = context.root / f"adopted-{context.layout.name}"
    if context.rank == 0:
        path.mkdir()
    collectives.barrier()
    averaged.save_checkpoint(path, step=NUM_STEPS)
    found = []
    for optimizer in (True, False):
        engine = context.engine(load=False, ema=EMA)
        engine.load_checkpoint(path, optimizer=optimizer)
        before = streamed(engine)
        found.append(engine.adopt_average() and are_equal(streamed(engine), before))
    return all(found)


def difference(weights: Mapping[str, Tensor], torchs: AveragedModel) -> float:
    """The largest of an element, in torch's order of the same names."""
    pairs = zip(weights.values(), torchs.module.parameters(), strict=True)
    return max(float((own - other).abs().max()) for own, other in pairs)


def are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """To the last bit."""
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )
