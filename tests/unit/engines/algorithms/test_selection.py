"""Answers that are kept to be imitated: by hand, by brute force, and as plain fine-tuning."""

import random
from collections.abc import Sequence

import pytest
import torch

from engines.algorithms.advantage import advantages
from engines.algorithms.parts import Advantages
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.sequences import on_last_token
from engines.algorithms.supervised import SupervisedLoss
from engines.config.algorithm import AlgorithmConfig
from engines.types import GlobalCounts, ModelOutputs, TokenBatch


def packed(answers: Sequence[Sequence[int]], draws: Sequence[float]) -> TokenBatch:
    """Each answer behind a prompt of two tokens; the number drawn for its last token is given."""
    return TokenBatch.from_sequences(
        [[1, 2, *answer] for answer in answers],
        loss_mask=[[0.0, 0.0, *([1.0] * len(answer))] for answer in answers],
        uniform=[
            [0.9, 0.9, *([0.5] * (len(answer) - 1)), draw][: 2 + len(answer)]
            for answer, draw in zip(answers, draws, strict=True)
        ],
    )


def chosen(
    answers: Sequence[Sequence[int]],
    scores: Sequence[float],
    groups: Sequence[int],
    draws: Sequence[float] | None = None,
    **options: float,
) -> Advantages:
    batch = packed(answers, draws or [i / 100 for i in range(len(answers))])
    rewards_T = on_last_token(
        torch.tensor(scores, dtype=torch.float64), batch.columns["loss_mask"] > 0, batch
    )
    algorithm = AlgorithmConfig(adv_estimator="raft", options=options)
    return advantages(algorithm, batch, rewards_T, torch.tensor(groups))


def kept(found: Advantages) -> list[int]:
    assert found.kept_B is not None
    return found.kept_B.nonzero().flatten().tolist()


def test_the_best_answer_to_each_prompt_has_weight_1() -> None:
    found = chosen([[7, 8], [9], [7]], [0.5, 2.0, -1.0], [0, 0, 1])
    assert kept(found) == [1, 2]
    assert found.advantages_T.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert found.metrics == {"critic/num_kept_samples": 2.0}


def test_several_right_answers_that_differ() -> None:
    answers = [[7], [8], [7], [9], [6], [8]]
    scores, groups = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 0, 1]
    few = chosen(answers, scores, groups, raft_num_kept=2, raft_min_reward=1.0)
    # 7 and 8 were drawn the smallest numbers; the second 7 is the first one again.
    assert kept(few) == [0, 1, 5]
    assert kept(chosen(answers, scores, groups, raft_num_kept=9, raft_min_reward=1.0)) == [
        0, 1, 4, 5,
    ]  # fmt: skip
    # Without a least reward a wrong one is taken before none.
    assert kept(chosen(answers, scores, groups, raft_num_kept=9)) == [0, 1, 3, 4, 5]


def test_of_equal_rewards_the_number_drawn_decides() -> None:
    answers = [[7], [8], [9]]
    assert kept(chosen(answers, [1.0] * 3, [0] * 3, [0.7, 0.2, 0.4])) == [1]
    assert kept(chosen(answers, [1.0, 0.9, 1.0], [0] * 3, [0.7, 0.2, 0.4])) == [2]


def test_a_step_may_keep_nothing() -> None:
    found = chosen([[7], [8]], [0.0, 0.5], [0, 1], raft_min_reward=1.0)
    assert kept(found) == []
    assert not found.advantages_T.any()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_agrees_with_a_search_over_every_answer(seed: int) -> None:
    draw = random.Random(seed)
    size, num_kept = 24, draw.randint(1, 4)
    answers = [[draw.randint(3, 5) for _ in range(draw.randint(0, 2))] for _ in range(size)]
    scores = [draw.choice([0.0, 0.5, 1.0]) for _ in range(size)]
    groups = [draw.randint(0, 3) for _ in range(size)]
    draws = draw.sample([i / 1000 for i in range(1000)], size)
    least = draw.choice([-1.0, 0.5])
    found = kept(
        chosen(answers, scores, groups, draws, raft_num_kept=num_kept, raft_min_reward=least)
    )
    for i in range(size):
        # How many distinct answers to the prompt come before it, by (reward, draw).
        before = {
            tuple(answers[j])
            for j in range(size)
            if groups[j] == groups[i]
            and answers[j]
            and (scores[j], -draws[j]) > (scores[i], -draws[i])
        }
        is_kept = bool(answers[i]) and scores[i] >= least and tuple(answers[i]) not in before
        assert (i in found) is (is_kept and len(before) < num_kept), i


def test_raft_with_reinforce_loss_equals_sft_on_kept_answers() -> None:
    answers = [[7, 8], [9], [7, 7, 7], [5]]
    found = chosen(answers, [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 2], raft_min_reward=1.0)
    batch = packed(answers, [0.1, 0.2, 0.3, 0.4]).with_columns(advantages=found.advantages_T)
    batch = batch.select(kept(found))
    algorithm = AlgorithmConfig(
        adv_estimator="raft", loss_mode="reinforce", options={"raft_min_reward": 1.0}
    )
    counts = GlobalCounts(int(batch.columns["loss_mask"].sum()), 3, 3)
    losses, gradients = [], []
    for loss_fn in (policy_loss_fn(algorithm, 8), SupervisedLoss()):
        generator = torch.Generator().manual_seed(0)
        leaf_T = (-torch.rand(batch.num_tokens, generator=generator)).requires_grad_()
        output = loss_fn(ModelOutputs(leaf_T), batch, counts)
        output.loss.backward()
        losses.append(output.loss.item())
        gradients.append(leaf_T.grad)
    assert losses[0] == losses[1]
    assert torch.equal(gradients[0], gradients[1])
