"""What one micro-batch of an update keeps for its backward pass, by role and loss function."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.saved_tensors import Kept, saved_tensors
from torch import Tensor

from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.value_objective import ValueObjective
from engines.collectives import close_process_group
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows.algorithm import KL_ESTIMATORS, POLICY_LOSSES
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.trainers.guards.mismatch import MeasuredObjective
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.training.create import create_engine
from engines.training.spec import LossFn, ModelType
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

VOCABULARY, LENGTHS = 512, (40, 7, 23, 30)
NUM_TOKENS = sum(LENGTHS)
NUM_PREDICTED = NUM_TOKENS - len(LENGTHS)
ROW, LOGITS = 4 * NUM_TOKENS, 4 * NUM_PREDICTED * VOCABULARY
"""Bytes of a float32 for each token, and of all logits: far more than any bound below."""


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    return make_model("qwen3", vocab_size=VOCABULARY, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    close_process_group()


def make_batch() -> TokenBatch:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS]
    mask = [[0.0] + [1.0] * (n - 1) for n in LENGTHS]
    batch = TokenBatch.from_sequences(ids, loss_mask=mask)
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "returns", "values")
    drawn = {name: torch.randn(NUM_TOKENS, generator=draw) for name in names}
    uniform = torch.rand(NUM_TOKENS, generator=draw, dtype=torch.float64)
    positive = torch.ones(NUM_TOKENS)
    return batch.with_columns(uniform=uniform, positive=positive, **drawn)


def sum_of_outputs(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """The cheapest loss: it keeps nothing of its own."""
    numbers_T = outputs.logprobs_T if outputs.values_T is None else outputs.values_T
    return LossOutput(numbers_T.sum())


def kept_by(
    model: Path, loss_fn: LossFn, model_type: ModelType = "language_model", **training: Any
) -> Kept:
    """In an update of one micro-batch."""
    engine = create_engine(
        model_type, model, TrainingConfig(num_threads=1, **training), OptimizerConfig(), 10,
        CPUPlatform(), 0,
    )  # fmt: skip
    engine.initialize()
    assert isinstance(engine, TransformersModelEngine)
    there: list[Tensor] = [*engine.model.parameters(), *engine.model.buffers()]
    with saved_tensors(but=there) as kept:
        engine.train_batch(make_batch(), loss_fn)
    return kept


def objective(**algorithm: Any) -> MeasuredObjective:
    return MeasuredObjective(policy_loss_fn(AlgorithmConfig(**algorithm), 64))


@pytest.fixture(scope="module")
def cheapest(model: Path) -> int:
    return kept_by(model, sum_of_outputs).num_bytes


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_policy_loss_keeps_rows_of_tokens(name: str, model: Path, cheapest: int) -> None:
    mode = POLICY_LOSSES.find(name).loss_agg_mode or "token-mean"
    kept = kept_by(model, objective(loss_mode=name, loss_agg_mode=mode))
    print(name, (kept.num_bytes - cheapest) / ROW)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_kl(name: str, model: Path, cheapest: int) -> None:
    kept = kept_by(model, objective(use_kl_loss=True, kl_loss_type=name))
    print(name, (kept.num_bytes - cheapest) / ROW)


def test_others(model: Path, cheapest: int) -> None:
    for chunked in (True, False):
        for settings in (
            {},
            {"entropy_coeff": 0.1},
            {"positive_nll_coef": 0.1},
            {"entropy_coeff": 0.1, "use_kl_loss": True},
        ):
            kept = kept_by(model, objective(**settings), chunked_logprobs=chunked)
            print(
                chunked, settings, (kept.num_bytes - cheapest) / ROW, kept.num_of_at_least(LOGITS)
            )
    a = kept_by(model, sum_of_outputs, "value_model").num_bytes
    for clip in (None, 0.5):
        print(
            "value", clip, (kept_by(model, ValueObjective(clip), "value_model").num_bytes - a) / ROW
        )
    print(cheapest / ROW)
