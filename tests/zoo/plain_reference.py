"""The reference of the zoo: transformers and torch alone, one sequence at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Sequences = Sequence[Sequence[int]]


class Lacking(Exception):
    """A family does not do what its column asks; the text says what."""


def answer_mask(length: int) -> list[float]:
    """1 on what is trained: the last two thirds of a sequence."""
    return [float(place >= max(1, length // 3)) for place in range(length)]


@torch.no_grad()
def plain_logprobs(model: nn.Module, sequence: Sequence[int]) -> Tensor:
    """By a plain forward pass: (length,) float32, 0 at the first token."""
    found = plain_logits(model, sequence)[:-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), found.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]])


@torch.no_grad()
def plain_logits(model: nn.Module, sequence: Sequence[int]) -> Tensor:
    """(length, V) float32 of one sequence."""
    return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


def plain_loss(model: nn.Module, sequences: Sequences) -> Tensor:
    """Mean negative log-likelihood of the trained tokens, one sequence at a time."""
    total, num_tokens = torch.zeros(()), 0.0
    for sequence in sequences:
        ids, mask = torch.tensor([sequence]), torch.tensor(answer_mask(len(sequence))[1:])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total = total + (cross_entropy(logits, ids[0, 1:], reduction="none") * mask).sum()
        num_tokens += float(mask.sum())
    return total / num_tokens


def relative_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor | None]) -> float:
    """Norm of the difference over that of what is wanted; None there is 0 everywhere."""
    gaps, sizes = [], []
    for name, gradient in wanted.items():
        reference = torch.zeros(()) if gradient is None else gradient
        gaps.append((found.get(name, torch.zeros(())) - reference).norm())
        sizes.append(reference.norm())
    if unknown := found.keys() - wanted.keys():
        raise Lacking(f"a gradient for {sorted(unknown)[0]}, which plain autograd does not know")
    return float(torch.stack(gaps).norm() / torch.stack(sizes).norm())


def largest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference over all tokens; NaN where one is."""
    pairs = zip(found, wanted, strict=True)
    return float(torch.cat([(a - b).abs() for a, b in pairs]).max())
