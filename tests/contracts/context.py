"""Engines of a backend under one layout, and the steps that every one of them takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rlhf.testing.layouts import Layout
from rlhf.testing.plain_loop import EPS, LR, NUM_STEPS, WEIGHT_DECAY, make_batch, value_targets

from engines.config.backends import ENGINES
from engines.config.training import EmaConfig, OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch
from hardware.detection import availability, create, detect
from infra.names import unknown_name

OPTIMIZER = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS)


@dataclass(frozen=True)
class Context:
    """Where a rank runs its cases.

    Attributes:
        backend: name of the backend.
        claims: what it can do.
        layout: of the ranks.
        root: directory of the tiny models and of what the cases leave behind.
        platform: name of the hardware platform.
    """

    backend: str
    claims: frozenset[str]
    layout: Layout
    root: Path
    platform: str = "cpu"

    def engine(
        self,
        model: str | None = None,
        *,
        load: bool = True,
        frozen: bool = False,
        values: bool = False,
        ema: EmaConfig | None = None,
        **training: Any,
    ) -> BaseEngine:
        """A new engine of this layout, initialized."""
        settings = {
            "num_workers": self.layout.world_size,
            "collective_timeout_s": 60.0,
            **self.layout.training,
            **training,
        }
        engine = create_engine(
            "value_model" if values else "language_model",
            self.root / (model or self.layout.model),
            TrainingConfig(backend=self.backend, **settings),
            None if frozen else OPTIMIZER.model_copy(update={"ema": ema}),
            100,
            detect(self.platform)[0],
            seed=0,
        )
        engine.initialize(load_weights=load)
        return engine

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank() if dist.is_initialized() else 0


def check_runnable(config: pytest.Config) -> None:
    """End the session where the named backend is unknown; skip where the platform is not here."""
    backend, platform = (config.getoption(option) for option in ("--backend", "--platform"))
    known = ENGINES.names()
    if backend not in known:
        pytest.exit(f"--backend: {unknown_name(backend, known)}", returncode=2)
    create(platform)  # an unknown name, or a plugin that does not load, is no skip
    found = availability(platform)
    if not found.ok:
        pytest.skip(f"needs a machine with {platform}: {found.reason}")


def share(engine: BaseEngine, batch: TokenBatch) -> TokenBatch:
    """Uneven on purpose: the last place gets one sequence, the others the rest."""
    size, place = engine.data_parallel_size, engine.data_parallel_rank
    if size == 1:
        return batch
    last = batch.num_sequences - 1
    return batch.select([last] if place == size - 1 else list(range(last))[place :: size - 1])


def loss_fn(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Token mean + half the mean of sequence means - a little entropy: uses all counts."""
    assert outputs.entropy_T is not None
    mask_T = batch.columns["loss_mask"]
    nll_T = -outputs.logprobs_T * mask_T
    sums_B = nll_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index_T, nll_T)
    sizes_B = nll_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index_T, mask_T)
    entropy = (outputs.entropy_T * mask_T).sum() / counts.num_tokens
    loss = (
        nll_T.sum() / counts.num_tokens
        + 0.5 * (sums_B / sizes_B.clamp(min=1)).sum() / counts.num_sequences
        - 0.01 * entropy
    )
    return LossOutput(loss, {"entropy": entropy, "trained": mask_T.sum()}, {"worst": nll_T.max()})


WITH_ENTROPY = Readouts(entropy=True)
loss_fn.readouts = WITH_ENTROPY


def value_loss_fn(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Mean squared error of the values."""
    assert outputs.values_T is not None
    errors_T = (outputs.values_T - value_targets(batch.input_ids_T)) ** 2
    return LossOutput((errors_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def train(engine: BaseEngine, steps: range = range(NUM_STEPS)) -> list[list[float]]:
    """(loss, gradient norm, metrics...) of each step."""
    results = []
    for step in steps:
        metrics = engine.train_batch(share(engine, make_batch(step)), loss_fn)
        values = [metrics.metrics[name] for name in ("entropy", "trained", "worst")]
        results.append([metrics.loss, metrics.grad_norm, *values, metrics.num_tokens])
    return results
