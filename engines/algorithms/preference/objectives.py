"""The loss function that a configuration of preference training names.

The loss function of a reward model: the better of two answers should get the larger score.

A score is the output of a value model behind the last token of a sequence, as the role `reward`
reads it. Promises: the mean over the pairs of the step for every number of ranks or micro-batches;
metrics add up likewise. Margins are a row made beforehand.

Prompts with answers to other prompts, on which KTO measures its reference point.

Made of a whole step, before ranks or micro-batches cut it, so that it depends on the step alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engines.algorithms.parts import options_as
from engines.algorithms.preference.answers import (
    CHOSEN,
    MARGIN,
    MASK,
    PairLoss,
    Pairs,
    check_batch,
    pairs_of,
    share_of_pairs,
)
from engines.algorithms.preference.kto import KtoObjective
from engines.algorithms.preference.options import KtoOptions, PairOptions, RewardModelOptions
from engines.algorithms.preference.pair_objective import PairObjective
from engines.config.options import own_options
from engines.config.rows import PREFERENCE_LOSSES
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch
from infra.plugins import load_row


def preference_objective(loss: str, options: Mapping[str, Any]) -> PairObjective | KtoObjective:
    """Return the loss of that name: over pairs, or over single answers.

    Raises:
        ConfigError: there is no such loss, or it does not have these options.
        TypeError: its row names the schema of another kind of loss.
    """
    row = PREFERENCE_LOSSES.find(loss)
    own = own_options(options, row, "preference.options")
    function = load_row(row, PREFERENCE_LOSSES.setting)
    if row.paired:
        return PairObjective(function, options_as(PairOptions, own))
    return KtoObjective(options_as(KtoOptions, own), function)


BEHIND = Readouts(last_values=True)


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None, options: RewardModelOptions
) -> PairLoss:
    """Bradley-Terry: ``-log sigmoid(s_w - s_l - a m) + c (s_w + s_l)^2``; rewards are the scores.

    The first term is that of arXiv:2204.05862, with the margin m of Llama 2 (arXiv:2307.09288
    eq. 2); the second that of arXiv:2312.09244: a comparison does not determine a constant added to
    both scores. a is `margin_coef`, c is `center_coef`; `margin_P` None is 0.
    """
    gap_P = chosen_P - rejected_P
    if margin_P is not None:
        gap_P = gap_P - options.margin_coef * margin_P
    centre_P = options.center_coef * (chosen_P + rejected_P).square()
    return PairLoss(centre_P - logsigmoid(gap_P), chosen_P, rejected_P)


@dataclass(frozen=True)
class RewardModelObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`."""

    options: RewardModelOptions
    readouts: Readouts = BEHIND

    @property
    def required_rows(self) -> frozenset[str]:
        """Rows that the batch must have."""
        return frozenset({CHOSEN, MARGIN} if self.options.margin_coef else {CHOSEN})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Args:
            batch: whole pairs, as units with the `required_rows` (of margins the chosen answer's
                counts). A pair counts if `loss_mask` is set on any of its tokens but the first.

        Raises:
            ValueError: the outputs are of a language model, the batch lacks something, or a unit
                is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("reward_model", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and scores of each pair; raises as a call."""
        if outputs.last_values_B is None:
            raise ValueError("a reward model's loss needs a value model and its last_values")
        check_batch(batch, [MASK], self.required_rows)
        pairs, scores_B = pairs_of(batch), outputs.last_values_B.to(torch.float64)
        margin_P = batch.rows[MARGIN][pairs.chosen_P] if self.options.margin_coef else None
        found = bradley_terry_loss(
            scores_B[pairs.chosen_P], scores_B[pairs.rejected_P], margin_P, self.options
        )
        return found, pairs


def mismatched(batch: TokenBatch, max_length: int) -> TokenBatch:
    """Combine prompts with each other's answers (arXiv:2402.01306 sec. 4.1), in the same order.

    Each answer, good or bad, is used once, for another prompt if there is one: the result estimates
    an expectation over the answers of the step. A prompt ends before the first trained token; a
    sequence without one is unchanged. The result has only the column `loss_mask`.

    Args:
        batch: a whole step, on the CPU, with no sequence longer than `max_length`.
        max_length: a longer result loses its end, but keeps at least one token of the answer.
    """
    lengths = batch.lengths_B.tolist()
    ids, masks = batch.input_ids_T.split(lengths), batch.columns[MASK].split(lengths)
    starts = [_first_trained(mask) for mask in masks]
    prompts = [tuple(each[:start].tolist()) for each, start in zip(ids, starts, strict=True)]
    givers = _givers(prompts, [start < size for start, size in zip(starts, lengths, strict=True)])

    def exchanged(parts: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.cat([parts[i][: starts[i]], parts[j][starts[j] :]])[:max_length]
            for i, j in enumerate(givers)
        ]

    new_ids = exchanged(ids)
    ends_B = torch.tensor([0, *(each.numel() for each in new_ids)]).cumsum(0)
    columns = {MASK: torch.cat(exchanged(masks))}
    return TokenBatch(torch.cat(new_ids), ends_B.to(torch.int32), columns, batch.images)


def _first_trained(mask: Tensor) -> int:
    """Return the index of the first trained token; the length if there is none."""
    places_N = (mask > 0).nonzero().flatten()
    return int(places_N[0]) if places_N.numel() else mask.numel()


def _givers(prompts: Sequence[tuple[int, ...]], answered: Sequence[bool]) -> list[int]:
    """Return whose answer each sequence gets: sorted by prompt, rotated by the largest count.

    A smaller rotation would leave that prompt some of its own answers. If a prompt has more than
    half of all answers, no other assignment leaves it fewer.
    """
    givers = list(range(len(prompts)))
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in givers:
        if answered[index]:
            by_prompt.setdefault(prompts[index], []).append(index)
    order = [index for indexes in by_prompt.values() for index in indexes]
    largest = max(map(len, by_prompt.values()), default=0)
    by = largest if largest < len(order) else 1
    for place, index in enumerate(order):
        givers[index] = order[(place + by) % len(order)]
    return givers
