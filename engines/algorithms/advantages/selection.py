"""Estimators that select answers to imitate; the others are not trained on.

Promises: the selection depends only on the prompt's own answers, not on their order. Answers
without trained tokens are never kept, equal answers once. A step may keep nothing.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from engines.algorithms.options import RaftOptions
from engines.algorithms.parts import AdvantageInputs, Advantages, options_as
from engines.algorithms.sequences import num_trained_B


def raft_advantages(inputs: AdvantageInputs) -> Advantages:
    """RAFT (arXiv:2304.06767 alg. 1): 1 for the best answers to each prompt, 0 for the others.

    With the loss `reinforce` a step is supervised fine-tuning on them: the mean of ``-log pi`` over
    their tokens. With `vanilla` it is RAFT++ (arXiv:2504.11343 sec. 3), which clips the ratio. The
    paper keeps one answer per prompt; `raft_num_kept` distinct ones with a minimum reward are
    rejection sampling fine-tuning (arXiv:2308.01825 sec. 3.3). Of answers with equal rewards, those
    with the smaller `uniform` number on their last token come first.
    """
    options = options_as(RaftOptions, inputs.options)
    kept_B = best_answers(inputs, options.raft_num_kept, options.raft_min_reward)
    metrics = {"critic/num_kept_samples": float(kept_B.sum())}
    of_samples = Advantages.of_samples(kept_B.to(torch.float64), inputs.batch)
    return replace(of_samples, kept_B=kept_B, metrics=metrics)


def best_answers(inputs: AdvantageInputs, num_kept: int, min_reward: float | None) -> Tensor:
    """Return (B,) bool, at most `num_kept` distinct answers per prompt with the largest rewards.

    Answers that earned less than `min_reward` are not kept; None: any reward.
    """
    sizes = num_trained_B(inputs.batch, inputs.mask_T).tolist()
    answers = inputs.batch.input_ids_T[inputs.mask_T].split(sizes)
    draws = inputs.batch.columns["uniform"][inputs.mask_T].split(sizes)
    outcomes, groups = inputs.outcomes_B.tolist(), inputs.group_B.tolist()
    candidates = [
        i
        for i, size in enumerate(sizes)
        if size and (min_reward is None or outcomes[i] >= min_reward)
    ]
    candidates.sort(key=lambda i: (-outcomes[i], float(draws[i][-1])))
    kept_B = torch.zeros(len(sizes), dtype=torch.bool)
    chosen: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for i in candidates:
        answer, of_prompt = tuple(answers[i].tolist()), chosen[groups[i]]
        if answer not in of_prompt and len(of_prompt) < num_kept:
            of_prompt.add(answer)
            kept_B[i] = True
    return kept_B
