"""What the RL loop keeps between two steps, over kills and rounds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.checkpoint.step_store import TrainerState
from engines.config.stages.rl import RLRoundStageConfig
from engines.trainers.loop_state import LoopState, Updates
from engines.trainers.trained_steps import TrainedSteps
from engines.types import TrainMetrics

UPDATE = TrainMetrics(loss=0.5, grad_norm=1.0, lr=0.1, num_tokens=3, metrics={})


def at_start(number: int = 2, before: TrainedSteps | None = None) -> LoopState:
    config = RLRoundStageConfig.model_validate(
        {
            "round": number,
            "model": {"init": "random", "max_length": 32},
            "training": {},
            "rollout": {},
            "rl": {"num_steps_per_round": 5, "algorithm": {"kl_ctrl": {"kl_coef": 0.25}}},
            "checkpoint": {},
        }
    )
    return LoopState.at_start(config.rl, config.round, before)


def test_a_round_counts_on_from_the_rounds_before() -> None:
    before = TrainedSteps(
        stage="rl_round", num_steps=5, num_skipped=2, kl_coef=0.5, num_critic_steps=4
    )
    assert at_start() == LoopState(5, 0, 5, 0, 0, 0, 0.25)
    assert at_start(before=before) == LoopState(5, 0, 5, 2, 0, 4, 0.5)


def test_steps_that_train_warm_up_and_train_nothing_by_hand() -> None:
    trained = at_start().after(
        Updates(policy=(UPDATE,), critic=(UPDATE,), trained_critic=True, num_poisoned=1),
        trains=True,
        kl_coef=0.3,
    )
    assert trained == LoopState(5, 1, 6, 0, 1, 1, 0.3)
    warming = trained.after(Updates(critic=(UPDATE,), trained_critic=True), trains=True, kl_coef=1)
    assert warming == LoopState(5, 2, 6, 0, 1, 2, 1)  # the policy keeps its version
    skipped = warming.after(Updates(), trains=False, kl_coef=1)
    assert skipped == LoopState(5, 3, 6, 1, 1, 2, 1)
    assert skipped.after(Updates(policy=(UPDATE,)), trains=True, kl_coef=1).num_skipped == 0
    assert skipped.trained_steps(with_kl_coef=True) == TrainedSteps(
        stage="rl_round", num_steps=8, num_skipped=1, kl_coef=1, num_critic_steps=2
    )
    assert skipped.trained_steps(with_kl_coef=False).kl_coef is None


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2), st.booleans(), st.integers(0, 2), st.booleans(), st.floats(0, 1e3)
        ),
        max_size=6,
    )
)
def test_a_checkpoint_holds_all_of_it(
    steps: list[tuple[int, bool, int, bool, float]],
) -> None:
    state = at_start()
    for num_updates, critic, num_poisoned, trains, kl_coef in steps:
        updates = Updates((UPDATE,) * num_updates, (), critic, num_poisoned)
        state = state.after(updates, trains=trains, kl_coef=kl_coef)
    values = json.loads(json.dumps(dict(state.values)))
    assert at_start().continued(TrainerState(state.step, values)) == state


@pytest.mark.parametrize("step", [0, 3])
def test_missing_loop_state_defaults_to_every_step_trained(
    step: int,
) -> None:
    state = at_start().continued(TrainerState(step))
    assert state == LoopState(5, step, 5 + step, 0, 0, step, 0.25)
