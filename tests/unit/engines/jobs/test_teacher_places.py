"""Where a round keeps its teacher: on the ranks, or in engines beside those of the policy."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.launch import launch_engines, policy_replica
from engines.controller.model_worker import WorkerSpec
from engines.controller.rollout import FrozenModel
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.jobs.rl_round import _roles, served_teacher
from engines.training.spec import POLICY, TEACHER
from infra.errors import ConfigError


def write_model(root: Path, characters: str = "0123456789+=", max_length: int = 32) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(),
        [characters],
        root / "tokenizer",
        max_length=max_length,
        chat_template=None,
    )
    create_random_model(ArchitectureConfig(num_layers=1), tokenizer, max_length, 1, root / "model")
    return root / "model"


def round_of(root: Path, teacher: Path, engine: str, served: dict[str, Any] | None) -> Any:
    """A context of the job, as far as a round asks it about models."""
    policy = write_model(root / "policy")
    config = RLRoundStageConfig.model_validate(
        {
            "round": 1,
            "model": {"path": str(policy), "max_length": 32},
            "training": {"dtype": "float32"},
            "rollout": {"engine": engine, "num_replicas": 3, "options": {"max_prefill_tokens": 9}},
            "rl": {"distillation": {"path": str(teacher), "num_top": 4, "served": served}},
            "checkpoint": {},
        }
    )
    given = {"model": policy, "teacher": teacher}
    return SimpleNamespace(
        config=config,
        spec=SimpleNamespace(inputs=given, seed=0),
        optional_input=given.get,
        input=lambda name: given.get(name, root),
        attempt_dir=root / "attempt",
    )


def teacher_beside(context: Any, *, embedded: bool) -> FrozenModel | None:
    config, roles = context.config, _roles(context)
    spec = WorkerSpec(roles, roles[POLICY].source.hf_dir, config.rollout, 1.0, "cpu", 0)
    like = policy_replica(spec, config.rollout, context.attempt_dir)
    distillation, source = config.rl.distillation, roles[POLICY].source
    return served_teacher(context, distillation, source, 32, like, embedded=embedded)


def test_on_the_ranks_it_is_a_role_and_nothing_serves_it(tmp_path: Path) -> None:
    context = round_of(tmp_path, write_model(tmp_path / "teacher"), "transformers", None)
    assert _roles(context).keys() == {POLICY, TEACHER}
    assert teacher_beside(context, embedded=True) is None


@pytest.mark.parametrize("embedded", [True, False])
def test_in_engines_of_its_own_no_rank_holds_it(tmp_path: Path, embedded: bool) -> None:
    directory = write_model(tmp_path / "teacher")
    served = {"num_replicas": 2, "options": {"max_prefill_tokens": 64}}
    context = round_of(tmp_path, directory, "transformers", served)
    assert _roles(context).keys() == {POLICY}
    teacher = teacher_beside(context, embedded=embedded)
    assert teacher is not None
    assert teacher.weights_dir == directory
    replica = teacher.replica
    assert (replica.serving_dir / "config.json").is_file()
    assert not list(replica.serving_dir.glob("*.safetensors"))
    assert replica.rollout.placement == ("colocated" if embedded else "disaggregated")
    assert (replica.rollout.num_replicas, replica.rollout.options) == (2, served["options"])
    assert not replica.shares_devices


def test_one_that_writes_no_answers_can_teach(tmp_path: Path) -> None:
    """A base model without template and end token reads as well as another."""
    directory = write_model(tmp_path / "teacher")
    for name in ("chat_template.jinja", "generation_config.json"):
        (directory / name).unlink()
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = None
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    teacher = teacher_beside(round_of(tmp_path, directory, "transformers", {}), embedded=True)
    assert teacher is not None
    with closing(launch_engines(teacher.replica).service()) as service:
        assert len(service.states()) == 1


@pytest.mark.parametrize(
    ("engine", "characters", "max_length", "field", "said"),
    [
        ("transformers", "abcdefghij+=", 32, "path", "a teacher whose tokenizer has"),
        ("vllm", "0123456789+=", 32, "served", "got a teacher of 32 tokens, .* need 33"),
    ],
)
def test_one_that_cannot_teach_is_refused_before_engines_start(
    tmp_path: Path, engine: str, characters: str, max_length: int, field: str, said: str
) -> None:
    directory = write_model(tmp_path / "teacher", characters, max_length)
    context = round_of(tmp_path, directory, engine, {})
    with pytest.raises(ConfigError, match=said) as found:
        teacher_beside(context, embedded=True)
    assert found.value.path == f"rl.distillation.{field}"
