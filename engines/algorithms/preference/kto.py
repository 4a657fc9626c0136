"""The loss function of preference training on single answers that are good or bad: KTO.

An answer's reward is compared with a reference point z0, the KL of policy and reference, estimated
on answers to other prompts. Promises: z0 is one number of the whole step, without gradient,
computed before the step is cut. A trainer computes it before each step:

1. `mismatched(batch, max_length)` of the whole step;
2. the log-probabilities of policy and reference on it (two passes without gradient);
3. `answers_of(...).log_ratio_N` of these as the row `mismatch_log_ratio` of the step.

`KtoObjective.extras` then takes the mean over all ranks. Departure: the paper and TRL take that of
each micro-batch, which would make the loss depend on how the step is cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.parts import Gather, check_batch
from engines.algorithms.preference.answers import (
    CHOSEN,
    MASK,
    REFERENCE,
    Answers,
    answers_of,
    right_side,
)
from engines.algorithms.preference.options import KtoOptions
from engines.algorithms.sequences import num_trained_B
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

MISMATCH = "mismatch_log_ratio"
Z0, NUM_CHOSEN, NUM_REJECTED = "kto_z0", "kto_num_chosen", "kto_num_rejected"


@dataclass(frozen=True)
class AnswerLoss:
    """Result of a loss over N single answers; `loss_N` has a gradient.

    `margin_N` is the distance to the reference point's reward, positive on the right side.
    """

    loss_N: Tensor
    reward_N: Tensor
    margin_N: Tensor


def kto_loss(answers: Answers, chosen_N: Tensor, z0: float, options: KtoOptions) -> AnswerLoss:
    """KTO (arXiv:2402.01306 eq. 8): ``w_D (1 - sigmoid(beta (h - z0)))`` for a good answer.

    And ``w_U (1 - sigmoid(beta (z0 - h)))`` for a bad one; h the log-ratio, z0 >= 0, rewards are
    beta h.
    """
    reward_N = options.beta * answers.log_ratio_N
    away_N = reward_N - options.beta * z0
    margin_N = torch.where(chosen_N, away_N, -away_N)
    weight_N = torch.where(
        chosen_N,
        torch.full_like(away_N, options.desirable_weight),
        torch.full_like(away_N, options.undesirable_weight),
    )
    return AnswerLoss(weight_N * torch.sigmoid(-margin_N), reward_N, margin_N)


@dataclass(frozen=True)
class KtoObjective:
    """KTO's loss function: (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    `loss` is a module-level function, so that the object can be sent to other processes.
    """

    options: KtoOptions
    loss: Callable[[Answers, Tensor, float, KtoOptions], AnswerLoss] = kto_loss

    def extras(self, batch: TokenBatch, gather: Gather) -> Mapping[str, float]:
        """Return ``z0 = max(0, mean of h)`` over answers to other prompts, and the counts.

        Numbers of the whole step, see `LossFn`. NaN is kept, so that the step is refused.
        """
        check_batch("kto", batch, [MASK], [CHOSEN, MISMATCH])
        trained_B = num_trained_B(batch, batch.columns[MASK] > 0) > 0
        log_ratio_N = gather(batch.rows[MISMATCH][trained_B])
        chosen_N = gather((batch.rows[CHOSEN][trained_B] > 0).to(torch.float64))
        num_chosen = float(chosen_N.sum())
        z0 = (log_ratio_N.sum() / max(log_ratio_N.numel(), 1)).clamp(min=0.0)
        return {Z0: float(z0), NUM_CHOSEN: num_chosen, NUM_REJECTED: chosen_N.numel() - num_chosen}

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics.

        Metrics under `preference/`: `loss`, `accuracy` (rewards on the right side of beta z0),
        `margin` (distance from it), `kl` (z0), and `chosen_reward` and `rejected_reward` if the
        step has such answers.

        Raises:
            ValueError: the batch lacks the columns `loss_mask`, `ref_logprobs` or the row `chosen`.
        """
        check_batch("kto", batch, [MASK, REFERENCE], [CHOSEN])
        answers = answers_of(outputs.logprobs_T, batch, reference=True)
        chosen_B = batch.rows[CHOSEN] > 0
        found = self.loss(answers, chosen_B, counts.extras[Z0], self.options)
        trained_B, reward_B = answers.num_tokens_N > 0, found.reward_N.detach()

        def share(values_B: Tensor) -> Tensor:
            return torch.where(trained_B, values_B, 0.0).sum() / max(counts.num_sequences, 1)

        loss, margin_B = share(found.loss_N), found.margin_N.detach()
        metrics = {
            "preference/loss": loss.detach(),
            "preference/accuracy": share(right_side(margin_B)),
            "preference/margin": share(margin_B),
            "preference/kl": share(torch.full_like(reward_B, counts.extras[Z0])),
        }
        for side, number, of_side_B in (
            ("chosen", NUM_CHOSEN, chosen_B),
            ("rejected", NUM_REJECTED, ~chosen_B),
        ):
            if counts.extras[number]:
                own_B = torch.where(trained_B & of_side_B, reward_B, 0.0)
                metrics[f"preference/{side}_reward"] = own_B.sum() / counts.extras[number]
        return LossOutput(loss, metrics)


def mismatched(batch: TokenBatch, max_length: int) -> TokenBatch:
    """Combine prompts with each other's answers (arXiv:2402.01306 sec. 4.1), in the same order.

    Each answer, good or bad, is used once, for another prompt as far as possible: the result
    estimates an expectation over all answers. A prompt ends before the first trained token; a
    sequence without one is unchanged. The result has the images and the column `loss_mask` only.

    Args:
        batch: a whole step, on the CPU, with no sequence longer than `max_length`.
        max_length: a longer result loses its end, but keeps at least one token of the answer.
    """
    lengths = batch.lengths_B.tolist()
    ids, masks = batch.input_ids_T.split(lengths), batch.columns[MASK].split(lengths)
    # A prompt ends before its first trained token; without one it is the whole sequence.
    starts = [next(iter((mask > 0).nonzero().flatten().tolist()), len(mask)) for mask in masks]
    prompts = [tuple(each[:start].tolist()) for each, start in zip(ids, starts, strict=True)]
    givers = _givers(prompts, [start < size for start, size in zip(starts, lengths, strict=True)])

    def exchanged(parts: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.cat([parts[i][: starts[i]], parts[j][starts[j] :]])[:max_length]
            for i, j in enumerate(givers)
        ]

    new_ids = exchanged(ids)
    ends_B = torch.tensor([0, *(each.numel() for each in new_ids)]).cumsum(0)
    return TokenBatch(
        torch.cat(new_ids),
        ends_B.to(torch.int32),
        {MASK: torch.cat(exchanged(masks))},
        batch.images,
    )


def _givers(prompts: Sequence[tuple[int, ...]], answered: Sequence[bool]) -> list[int]:
    """Return whose answer each sequence gets: sorted by prompt, rotated by the largest count.

    A smaller rotation would give the prompt with most answers some of its own. If it has more than
    half of all answers, no other assignment gives it fewer.
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
