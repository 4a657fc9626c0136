"""What one micro-batch of an update keeps for its backward pass, by role and loss function."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.saved_tensors import Kept, saved_tensors
from torch import Tensor

from engines.algorithms.policy_objective import ValueObjective, policy_loss_fn
from engines.collectives import close_process_group
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows import KL_ESTIMATORS, POLICY_LOSSES
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.trainers.mismatch import MeasuredObjective
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.training.base import create_engine
from engines.training.spec import LossFn, ModelType
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

VOCABULARY, LENGTHS = 512, (40, 7, 23, 30)
NUM_TOKENS = sum(LENGTHS)
NUM_PREDICTED = NUM_TOKENS - len(LENGTHS)
ROW, LOGITS = 4 * NUM_TOKENS, 4 * NUM_PREDICTED * VOCABULARY
"""Bytes of a float32 for each token, and of all logits: far more than any bound below."""
MAX_ROWS, MAX_ROWS_OF_A_TERM = 16, 4
"""float32 numbers for each token that a loss function may keep, and one more term of it."""


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


def rows_above(kept: Kept, cheapest: int) -> float:
    """What a loss function keeps of its own, in float32 numbers for each token."""
    return (kept.num_bytes - cheapest) / ROW


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_policy_loss_keeps_a_few_numbers_for_each_token(
    name: str, model: Path, cheapest: int
) -> None:
    mode = POLICY_LOSSES.find(name).loss_agg_mode or "token-mean"
    kept = kept_by(model, objective(loss_mode=name, loss_agg_mode=mode))
    assert 0 < rows_above(kept, cheapest) <= MAX_ROWS


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_a_kl_in_the_loss_keeps_a_few_more(name: str, model: Path) -> None:
    without = kept_by(model, objective()).num_bytes
    kept = kept_by(model, objective(use_kl_loss=True, kl_loss_type=name))
    assert 0 <= rows_above(kept, without) <= MAX_ROWS_OF_A_TERM


@pytest.mark.parametrize(
    "settings",
    [{"entropy_coeff": 0.1}, {"positive_nll_coef": 0.1}, {"loss_agg_mode": "seq-mean-token-mean"}],
    ids=str,
)
def test_other_terms_keep_hardly_anything(settings: dict[str, Any], model: Path) -> None:
    without = kept_by(model, objective()).num_bytes
    assert rows_above(kept_by(model, objective(**settings)), without) <= MAX_ROWS_OF_A_TERM


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
@pytest.mark.parametrize(("chunked", "num_logits"), [(True, 0), (False, 1)])
def test_all_logits_are_kept_once_or_not_at_all(
    entropy_coeff: float, chunked: bool, num_logits: int, model: Path, cheapest: int
) -> None:
    """With the bonus too: the entropy's gradient is made from what the log-probability's is."""
    kept = kept_by(model, objective(entropy_coeff=entropy_coeff), chunked_logprobs=chunked)
    assert kept.num_of_at_least(LOGITS) == num_logits
    assert rows_above(kept, cheapest + num_logits * LOGITS) <= MAX_ROWS


@pytest.mark.parametrize("cliprange", [None, 0.5])
def test_a_value_loss_keeps_a_few_numbers_for_each_token(
    cliprange: float | None, model: Path
) -> None:
    cheapest = kept_by(model, sum_of_outputs, "value_model").num_bytes
    kept = kept_by(model, ValueObjective(cliprange), "value_model")
    assert 0 < rows_above(kept, cheapest) <= MAX_ROWS
    assert kept.num_of_at_least(LOGITS) == 0


def test_the_gauge_sees_what_a_careless_loss_keeps(model: Path, cheapest: int) -> None:
    def careless(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        spread = outputs.logprobs_T[:, None] * torch.ones(NUM_TOKENS, VOCABULARY)
        return LossOutput(spread.square().sum())

    assert rows_above(kept_by(model, careless), cheapest) >= 2 * VOCABULARY
