"""Trajectories of several segments and branches, against plain loops over floats."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.algorithms.advantage import advantages
from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.sequences import on_last_token
from engines.config.algorithm import AlgorithmConfig
from engines.trainers.packing import pack, segment_rewards_T, viewed
from engines.trajectory import Prompt, Segment, Trajectory
from engines.types import GlobalCounts, ModelOutputs

GAMMA, LAM = 0.9, 0.8
NUMBERS = st.floats(-2, 2, width=32)


@dataclass(frozen=True)
class PlainToken:
    """A token as the loops below see it."""

    token_id: int
    logprob: float = 0.0
    trained: bool = False
    earned: float = 0.0


@st.composite
def segments(draw: st.DrawFn, trained: bool) -> Segment:
    num_tokens = draw(st.integers(0 if not trained else 1, 4))
    token_ids = draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))
    reward = draw(st.none() | NUMBERS)
    if not trained:
        left = Segment.given(token_ids)
        return Segment(left.token_ids_N, left.logprobs_N, trained=False, reward=reward)
    logprobs = draw(st.lists(NUMBERS, min_size=num_tokens, max_size=num_tokens))
    sampled = Segment.sampled(token_ids, logprobs, [3] * num_tokens)
    return Segment(sampled.token_ids_N, sampled.logprobs_N, sampled.version_runs, reward=reward)


@st.composite
def families(draw: st.DrawFn) -> list[Trajectory]:
    """An answer, a tool's text and another answer; and two branches of that."""
    prompt = Prompt("prompt=0", np.array(draw(st.lists(st.integers(0, 99), min_size=1,
                                                       max_size=3)), np.int32))  # fmt: skip
    kinds = (True, False, True)
    first = Trajectory(prompt, 0, tuple(draw(segments(kind)) for kind in kinds), "stop")
    found = [first]
    for sample in (1, 2):
        kept = draw(st.integers(0, 2))
        shared = first.segments[:kept]
        own = tuple(draw(segments(kind)) for kind in kinds[kept:])
        point = sum(segment.num_tokens for segment in shared)
        found.append(Trajectory(prompt, sample, (*shared, *own), "length", 0, point))
    return found


def plain_tokens(trajectory: Trajectory) -> list[PlainToken]:
    """Its tokens with what they earned, one by one."""
    found = [PlainToken(int(token)) for token in trajectory.prompt.token_ids_P]
    behind = 0
    for segment in trajectory.segments:
        for token, logprob in zip(
            segment.token_ids_N.tolist(), segment.logprobs_N.tolist(), strict=True
        ):
            is_own = behind >= trajectory.branch_point
            found.append(PlainToken(token, logprob, segment.trained and is_own))
            behind += 1
        if segment.reward is not None:
            _earn(found, segment.reward)
    return found


def _earn(tokens: list[PlainToken], reward: float) -> None:
    for place in reversed(range(len(tokens))):
        if tokens[place].trained:
            old = tokens[place]
            tokens[place] = PlainToken(old.token_id, old.logprob, True, old.earned + reward)
            return


@given(families())
def test_viewed_trajectories_are_equal_and_share_batch_memory(
    family: list[Trajectory],
) -> None:
    batch = pack(family)
    for own, view in zip(family, viewed(family, batch), strict=True):
        assert view.segments == own.segments
        assert (view.name, view.finish, view.parent) == (own.name, own.finish, own.parent)
        assert (view.branch_point, view.images) == (own.branch_point, own.images)
        for segment in (each for each in view.segments if each.num_tokens):
            assert np.shares_memory(segment.token_ids_N, batch.input_ids_T.numpy())
            logprobs_T = batch.columns["rollout_logprobs"].numpy()
            assert np.shares_memory(segment.logprobs_N, logprobs_T)


@given(families())
def test_masks_logprobs_and_rewards_are_those_of_a_loop(family: list[Trajectory]) -> None:
    batch = pack(family)
    tokens = [token for each in family for token in plain_tokens(each)]
    assert batch.input_ids_T.tolist() == [token.token_id for token in tokens]
    assert batch.lengths_B.tolist() == [len(plain_tokens(each)) for each in family]
    assert batch.columns["loss_mask"].tolist() == [token.trained for token in tokens]
    assert batch.columns["rollout_logprobs"].tolist() == [token.logprob for token in tokens]
    earned = segment_rewards_T(family, batch).tolist()
    assert earned == pytest.approx([token.earned for token in tokens], abs=1e-12)


@given(families(), st.data())
def test_returns_and_gae_pass_over_what_is_not_trained(
    family: list[Trajectory], data: st.DataObject
) -> None:
    """What stood before a tool's text is discounted by the trained tokens between alone."""
    batch = pack(family)
    score = data.draw(st.lists(NUMBERS, min_size=3, max_size=3))
    values = data.draw(st.lists(NUMBERS, min_size=batch.num_tokens, max_size=batch.num_tokens))
    mask_T = batch.columns["loss_mask"] > 0
    rewards_T = on_last_token(torch.tensor(score, dtype=torch.float64), mask_T, batch)
    rewards_T += segment_rewards_T(family, batch)
    with_values = batch.with_columns(values=torch.tensor(values)).with_rows(
        last_values=torch.zeros(3)
    )
    options = {"gamma": GAMMA, "lam": LAM, "whiten": False}
    algorithm = AlgorithmConfig(adv_estimator="gae", options=options)
    found = advantages(algorithm, with_values, rewards_T, torch.zeros(3, dtype=torch.int64))
    wanted_advantages: list[float] = []
    wanted_returns: list[float] = []
    start = 0
    for number, each in enumerate(family):
        tokens = plain_tokens(each)
        _earn(tokens, score[number])
        advantage, value_behind = 0.0, 0.0
        of_advantages, of_returns = [0.0] * len(tokens), [0.0] * len(tokens)
        for place in reversed(range(len(tokens))):
            if tokens[place].trained:
                value = values[start + place]
                delta = tokens[place].earned + GAMMA * value_behind - value
                advantage = delta + GAMMA * LAM * advantage
                of_advantages[place], of_returns[place] = advantage, advantage + value
                value_behind = value
        wanted_advantages += of_advantages
        wanted_returns += of_returns
        start += len(tokens)
    assert found.returns_T is not None
    assert found.advantages_T.tolist() == pytest.approx(wanted_advantages, abs=1e-5)
    assert found.returns_T.tolist() == pytest.approx(wanted_returns, abs=1e-5)


@given(families(), st.data())
def test_the_loss_is_that_of_a_loop(family: list[Trajectory], data: st.DataObject) -> None:
    """The clipped loss of PPO, a mean over the trained tokens of the step."""
    batch = pack(family)
    numbers = st.lists(NUMBERS, min_size=batch.num_tokens, max_size=batch.num_tokens)
    new, old, weights = (data.draw(numbers) for _ in range(3))
    mask = batch.columns["loss_mask"].tolist()
    num_trained = int(sum(mask))
    filled = batch.with_columns(advantages=torch.tensor(weights), old_logprobs=torch.tensor(old))
    loss_fn = policy_loss_fn(AlgorithmConfig(clip_ratio_c=1e9), 8)
    found = loss_fn(ModelOutputs(torch.tensor(new)), filled, GlobalCounts(num_trained, len(family)))
    wanted = 0.0
    for place, trained in enumerate(mask):
        if trained:
            ratio = math.exp(new[place] - old[place])
            clipped = min(max(ratio, 0.8), 1.2)
            wanted += max(-weights[place] * ratio, -weights[place] * clipped) / num_trained
    assert float(found.loss) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_columns_of_segments_are_0_elsewhere() -> None:
    prompt = Prompt("prompt=0", np.array([1, 2], np.int32))
    tool = Segment.given([5])
    own = Segment(
        np.array([7, 8], np.int32),
        np.zeros(2, np.float32),
        columns={"k2": np.array([[1, 2], [3, 4]], np.float32)},
    )
    batch = pack([Trajectory(prompt, 0, (tool, own), "stop")])
    assert batch.columns["k2"].tolist() == [[0, 0], [0, 0], [0, 0], [1, 2], [3, 4]]


def test_no_trajectory_is_an_empty_batch() -> None:
    batch = pack([])
    assert (batch.num_tokens, batch.num_sequences) == (0, 0)
    assert segment_rewards_T([], batch).tolist() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs_N": np.zeros(1, np.float32)}, r"logprobs_N: got 1 rows; need 2"),
        ({"token_ids_N": np.array([7, 8])}, "need int32 and float32"),
        ({"version_runs": ((1, 1),)}, "version_runs: got 1 tokens; need 2"),
        ({"columns": {"x": np.zeros(3, np.float32)}}, "x: got 3 rows; need 2"),
        ({"routes": np.zeros((1, 2, 2), np.int16)}, "routes: got 1 rows; need 2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict, said: str) -> None:
    whole = {"token_ids_N": np.array([7, 8], np.int32), "logprobs_N": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match=said):
        Segment(**{**whole, **change})


def test_a_branch_point_lies_within_its_tokens_and_has_a_parent() -> None:
    prompt = Prompt("prompt=0", np.array([1], np.int32))
    for parent, point in ((None, 1), (0, 2)):
        with pytest.raises(ValueError, match=f"branch_point: got {point}"):
            Trajectory(prompt, 1, (Segment.given([3]),), "stop", parent, point)
