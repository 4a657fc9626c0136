"""The reference of the backend contract: transformers and torch alone, one sequence at a time.

Nothing of the project is used here but the batch that both sides are given.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engines.types import TokenBatch

NUM_STEPS = 4
LR, WEIGHT_DECAY = 1e-2, 0.1
EPS = 1e-6
"""Of Adam: with its usual 1e-8, rounding decides the sign of steps on the smallest gradients."""
Row = tuple[Tensor, Tensor]


def make_batch(step: int) -> TokenBatch:
    """Eight sequences of 2 to 23 tokens; one of them is not trained on at all.

    Args:
        step: of the run; each has its own batch.

    Returns:
        With the column `loss_mask`.
    """
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(2, 24, (8,), generator=generator).tolist()
    ids = [torch.randint(3, 19, (n,), generator=generator).tolist() for n in lengths]
    masks = [[float(t >= max(1, n // 3)) for t in range(n)] for n in lengths]
    masks[3] = [0.0] * lengths[3]
    return TokenBatch.from_sequences(ids, loss_mask=masks)


def without_mask(batch: TokenBatch) -> TokenBatch:
    """The same sequences, asked for every token."""
    return TokenBatch(batch.input_ids_T, batch.cu_seqlens)


def value_targets(ids: Tensor) -> Tensor:
    """What a value model shall predict before each token: something that depends on it."""
    return (ids % 5).float() / 2 - 1


def train_plainly(model_dir: Path, value_model: bool = False) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step.

    Args:
        model_dir: of a tiny model.
        value_model: train values instead of log-probabilities.

    Returns:
        One pair per step.
    """
    return plain_steps(load(model_dir, value_model), value_loss if value_model else language_loss)


def load(model_dir: Path, value_model: bool = False) -> nn.Module:
    """The model in float32; the head of a value model starts at 0."""
    if not value_model:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = AutoModelForTokenClassification.from_pretrained(
        model_dir, dtype=torch.float32, num_labels=1
    )
    for name, parameter in model.named_parameters():
        if name.startswith("score."):
            nn.init.zeros_(parameter)
    return model.eval()


def adamw(
    model: nn.Module, lr: float = LR, eps: float = EPS, weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
    """Of the parameters that are trained; only matrices decay.

    Gradients start at 0: what a step never reaches still decays.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        eps=eps,
    )


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> tuple[float, float]:
    """One step of a loss that was just computed: it, and the gradient norm before clipping to 1."""
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return loss.item(), norm.item()


def plain_steps(
    model: nn.Module, loss_of: Callable[[nn.Module, list[Row]], Tensor]
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step; the model is changed in place."""
    optimizer = adamw(model)
    return [
        take_step(optimizer, loss_of(model, rows_of(make_batch(step)))) for step in range(NUM_STEPS)
    ]


def rows_of(batch: TokenBatch) -> list[Row]:
    """(token ids, loss mask of the predictions) of each sequence."""
    lengths = batch.lengths_B.tolist()
    masks = batch.columns["loss_mask"].split(lengths)
    return [
        (ids, mask[1:]) for ids, mask in zip(batch.input_ids_T.split(lengths), masks, strict=True)
    ]


def language_loss(model: nn.Module, rows: list[Row]) -> Tensor:
    """Token mean + half the mean of sequence means - a little entropy."""
    num_tokens = sum(int(mask.sum()) for _, mask in rows)
    num_sequences = sum(bool(mask.any()) for _, mask in rows)
    loss = torch.zeros(())
    for ids, mask in rows:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        nll = cross_entropy(logits, ids[1:], reduction="none") * mask
        entropy = torch.distributions.Categorical(logits=logits).entropy() * mask
        loss = loss + nll.sum() / num_tokens - 0.01 * entropy.sum() / num_tokens
        loss = loss + 0.5 * nll.sum() / max(1.0, float(mask.sum())) / num_sequences
    return loss


def value_loss(model: nn.Module, rows: list[Row]) -> Tensor:
    """Mean squared error of the value before each token that is trained on."""
    num_tokens = sum(int(mask.sum()) for _, mask in rows)
    loss = torch.zeros(())
    for ids, mask in rows:
        values = model(input_ids=ids[None]).logits[0, :-1, 0]
        loss = loss + ((values - value_targets(ids[1:])) ** 2 * mask).sum() / num_tokens
    return loss


def logprobs_of(
    model: nn.Module, batch: TokenBatch
) -> tuple[list[float], list[float], list[float]]:
    """Log-probability of each token; entropy and sum of squares of what predicted it; 0 at first.

    Returns:
        One list each, over the tokens of all sequences.
    """
    logprobs: list[float] = []
    entropies: list[float] = []
    squares: list[float] = []
    for ids in batch.input_ids_T.split(batch.lengths_B.tolist()):
        with torch.no_grad():
            distribution = torch.distributions.Categorical(
                logits=model(input_ids=ids[None]).logits[0, :-1]
            )
        logprobs += [0.0, *distribution.log_prob(ids[1:]).tolist()]
        entropies += [0.0, *distribution.entropy().tolist()]
        squares += [0.0, *distribution.probs.square().sum(-1).tolist()]
    return logprobs, entropies, squares


def values_of(model: nn.Module, batch: TokenBatch) -> tuple[list[float], list[float]]:
    """Value before each token, 0 for first tokens; and behind the last token of each sequence."""
    values: list[float] = []
    last: list[float] = []
    for ids in batch.input_ids_T.split(batch.lengths_B.tolist()):
        with torch.no_grad():
            *own, behind = model(input_ids=ids[None]).logits[0, :, 0].tolist()
        values += [0.0, *own]
        last.append(behind)
    return values, last
