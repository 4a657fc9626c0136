"""Rows of a head, and their names: against all logits, and there and back as columns."""

import pytest
import torch
from torch import Tensor

from engines.errors import EngineError
from engines.training.model import linear_logprobs, linear_tiles
from engines.training.model.linear_logprobs import head_rows, targets_of
from engines.training.outputs import (
    from_columns,
    model_outputs,
    num_columns,
    read_positions,
    to_columns,
)
from engines.types import ModelOutputs, Readouts, TokenBatch

D, V, K, TEMPERATURE = 4, 11, 3, 0.7
BATCH = TokenBatch.from_sequences(
    [[3, 4, 5, 6], [7], [8, 9, 10]], loss_mask=[[0.0, 1.0, 0.0, 1.0], [0.0], [0.0, 1.0, 1.0]]
)
READ = [1, 3, 6, 7]
ASKED = BATCH.with_columns(asked=torch.arange(8 * K).view(8, K) * 7 % V)


def draw() -> tuple[Tensor, Tensor]:
    """(T, D) and (V, D), with gradient."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=generator) for n in (8, V))
    return hidden.requires_grad_(), weight.requires_grad_()


def outputs_of(
    hidden_TD: Tensor, weight_VD: Tensor, batch: TokenBatch, readouts: Readouts
) -> ModelOutputs:
    """As a backend does it."""
    read_N = read_positions(batch, readouts)
    assert read_N.tolist() == READ
    targets = targets_of(batch, read_N, TEMPERATURE, readouts)
    rows = head_rows(hidden_TD[read_N - 1], weight_VD, targets, chunk_elements=20)
    whole = rows.new_zeros(rows.shape[0], batch.num_tokens + 1).index_copy(1, read_N, rows)
    return model_outputs(whole, batch, readouts, "language_model")


def check_columns(outputs: ModelOutputs, batch: TokenBatch, readouts: Readouts) -> None:
    """There and back as columns nothing is lost."""
    columns = to_columns(outputs, batch)
    assert columns.shape == (num_columns(readouts, "language_model", batch), batch.num_tokens)
    again = from_columns(columns, batch, readouts, "language_model")
    for name, value in vars(outputs).items():
        found = vars(again)[name]
        assert (found is None) == (value is None)
        assert value is None or (torch.equal(found, value) and found.dtype == value.dtype)


@pytest.mark.parametrize("others", [False, True])
def test_of_named_tokens(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tiles, "_MIN_ROWS", 2)
    hidden, weight = draw()
    readouts = Readouts(entropy=others, sum_pi_squared=others, logprobs_of="asked")
    found = outputs_of(hidden, weight, ASKED, readouts)
    logprobs = (hidden[torch.tensor(READ) - 1] @ weight.T / TEMPERATURE).log_softmax(dim=1)
    wanted = logprobs.gather(1, ASKED.columns["asked"][READ])
    assert found.topk_logprobs_TK is not None
    torch.testing.assert_close(found.topk_logprobs_TK[READ], wanted)
    own = logprobs.gather(1, ASKED.input_ids_T[READ][:, None]).squeeze(1)
    torch.testing.assert_close(found.logprobs_T[READ], own)
    unread = [0, 2, 4, 5]
    assert not found.topk_logprobs_TK[unread].any()
    if others:
        assert found.entropy_T is not None
        assert found.sum_pi_squared_T is not None
        entropy = -(logprobs.exp() * logprobs).sum(dim=1)
        torch.testing.assert_close(found.entropy_T[READ], entropy)
        torch.testing.assert_close(found.sum_pi_squared_T[READ], logprobs.exp().square().sum(1))
    weights = torch.arange(1.0, 4 * K + 1).view(4, K)
    total = (found.topk_logprobs_TK[READ] * weights).sum() + found.logprobs_T.sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    expected = torch.autograd.grad((wanted * weights).sum() + own.sum(), (hidden, weight))
    torch.testing.assert_close(grads, expected)
    check_columns(found, ASKED, readouts)


def test_of_the_likeliest_tokens() -> None:
    hidden, weight = draw()
    readouts = Readouts(entropy=True, num_top=K)
    found = outputs_of(hidden, weight, BATCH, readouts)
    logprobs = (hidden[torch.tensor(READ) - 1] @ weight.T / TEMPERATURE).log_softmax(dim=1)
    wanted = logprobs.topk(K, dim=1)
    assert found.topk_ids_TK is not None
    assert found.topk_logprobs_TK is not None
    assert torch.equal(found.topk_ids_TK[READ], wanted.indices)
    torch.testing.assert_close(found.topk_logprobs_TK[READ], wanted.values)
    assert found.logprobs_T.requires_grad
    check_columns(found, BATCH, readouts)
    # Asked for those, a student that is its teacher has its teacher's numbers.
    taught = BATCH.with_columns(asked=found.topk_ids_TK)
    student = outputs_of(hidden, weight, taught, Readouts(logprobs_of="asked"))
    assert student.topk_logprobs_TK is not None
    assert torch.equal(student.topk_logprobs_TK, found.topk_logprobs_TK)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs_of='x' and num_top=3; need one of them"):
        Readouts(logprobs_of="x", num_top=3)
    with pytest.raises(EngineError, match="got none as column 'x'"):
        num_columns(Readouts(logprobs_of="x"), "language_model", BATCH)
    with pytest.raises(EngineError, match=r"got \(8,\) torch.float32 as column 'loss_mask'"):
        num_columns(Readouts(logprobs_of="loss_mask"), "language_model", BATCH)
    with pytest.raises(EngineError, match=r"gave 1 values per token; .* needs 7"):
        model_outputs(torch.zeros(1, 9), BATCH, Readouts(num_top=3), "language_model")


def test_entropies_that_are_only_reported_cost_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients of the logprobs are bitwise those of a loss that gives entropies 0."""
    slopes: list[bool] = []
    of_tiles = linear_logprobs.LogitSlopes

    def spy(*values: Tensor | None) -> object:
        slopes.append(values[-1] is not None)
        return of_tiles(*values)

    monkeypatch.setattr(linear_logprobs, "LogitSlopes", spy)
    gradients = []
    for readouts in (Readouts(entropy=True), Readouts(entropy=True, entropy_gradient=False)):
        hidden, weight = draw()
        outputs = outputs_of(hidden, weight, BATCH, readouts)
        assert outputs.entropy_T is not None
        assert torch.equal(outputs.entropy_T.detach() > 0, BATCH.columns["loss_mask"] > 0)
        outputs.logprobs_T.square().sum().backward()
        gradients.append((hidden.grad, weight.grad, all(slopes)))
        assert slopes
        slopes.clear()
    (*first, with_slopes), (*second, without) = gradients
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert with_slopes
    assert not without
