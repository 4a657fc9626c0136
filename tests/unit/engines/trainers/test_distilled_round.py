"""Rounds of RL with a teacher: what it says reaches the policy, and nothing else does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig

Round = Callable[..., list[dict[str, float]]]
KEYS = ("distillation/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than its student, with the same tokens."""
    shape = ArchitectureConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
    )
    path = tmp_path_factory.mktemp("teacher") / "model"
    create_random_model(shape, tiny_model, 32, 7, path)
    return path


def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    run_round: Round, tiny_model: Path
) -> None:
    steps = run_round(
        "odd_length", group_size=1, distillation={"path": str(tiny_model), "num_top": 5}
    )
    assert [tuple(step[key] for key in KEYS) for step in steps] == [(0.0, 0.0)] * len(steps)


@pytest.mark.parametrize("loss", ["topk", "k2", "k3+"])
def test_a_student_comes_nearer_to_its_teacher(run_round: Round, teacher: Path, loss: str) -> None:
    section = {"path": str(teacher), "loss": loss, "num_top": 8}
    steps = run_round("odd_length", group_size=8, num_steps_per_round=30, distillation=section)
    losses = [step["distillation/loss"] for step in steps]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert "actor/pg_loss" not in steps[0]
    assert steps[0]["actor/entropy"] > 0
    if loss == "topk":
        apart = [
            abs(step["distillation/teacher_mass"] - step["distillation/student_mass"])
            for step in (steps[0], steps[-1])
        ]
        assert apart[1] < apart[0]


@pytest.mark.parametrize(
    ("loss", "temperature"), [("topk", 1.0), ("topk", 0.7), ("k3+", 1.0), ("k2", 0.7)]
)
def test_a_teacher_in_engines_of_its_own_teaches_the_same(
    run_round: Round, teacher: Path, loss: str, temperature: float
) -> None:
    section = {"path": str(teacher), "loss": loss, "num_top": 8}
    sampling = {"max_new_tokens": 5, "temperature": temperature}
    taught = partial(run_round, "odd_length", num_steps_per_round=4, sampling=sampling)
    held, asked = (
        taught(work=work, distillation={**section, "served": served})
        for work, served in (("held", None), ("asked", {"options": {"max_prefill_tokens": 40}}))
    )
    assert len(held) == len(asked) == 4
    for name in (*KEYS, "actor/entropy"):
        expected = pytest.approx([step[name] for step in held], rel=1e-5)
        assert [step[name] for step in asked] == expected
    assert held[0][KEYS[0]] > 1e-3


def test_rewards_may_teach_beside_it(run_round: Round, teacher: Path) -> None:
    section = {"path": str(teacher), "num_top": 8, "policy_weight": 2.0}
    step = run_round("odd_length", distillation=section)[0]
    # One update of samples that are the policy's own, advantages of mean 0 in groups: only the
    # teacher's part is left of the value.
    both = step["distillation/loss"] + 2.0 * step["actor/pg_loss"]
    assert step["actor/loss"] == pytest.approx(both, rel=1e-6)
    assert step["actor/grad_norm"] > 0
