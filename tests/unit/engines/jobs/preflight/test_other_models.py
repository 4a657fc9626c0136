"""Models beside the policy are looked at before anything trains."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_cases import write_chat_model

from engines.checkpoint.model_directory import create_random_model
from engines.config.algorithm import DistillationConfig
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.preflight_request import PreflightRequest
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.jobs.preflight.run import check_request
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError


def taught(model: Path, **teacher: object) -> PreflightRequest:
    recipe = load_recipe(
        "quickstart",
        [f"model={{init: pretrained, path: {model}, max_length: 32}}", "data.max_prompt_length=16"],
    )
    section = DistillationConfig.model_validate({"num_top": 4, **teacher})
    found = request_of(
        recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"distillation": section})})
    )
    assert found is not None
    return found


def write_model(directory: Path, characters: str) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(), [characters], directory / "tokenizer", max_length=32, chat_template=None
    )
    create_random_model(ArchitectureConfig(num_layers=1), tokenizer, 32, 1, directory / "model")
    return directory / "model"


def test_teacher_with_other_tokens_is_refused_before_the_run(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", "0123456789+= user assistant")
    other = write_model(tmp_path / "teacher", "abcdefghij+= user assistant")
    with pytest.raises(
        ConfigError, match="a teacher whose tokenizer has .* need equal ids"
    ) as found:
        check_request(taught(student, path=str(other)))
    assert found.value.path == "rl.distillation.path"
    with pytest.raises(ConfigError, match="got 1000; need at most the vocabulary") as found:
        check_request(taught(student, path=str(student), num_top=1000))
    assert found.value.path == "rl.distillation.num_top"
    with pytest.raises(ConfigError) as found:
        check_request(taught(student, path=str(tmp_path)))
    assert found.value.path.startswith("rl.distillation")
    check_request(taught(student, path=str(student)))


def test_a_teacher_has_to_be_one_that_the_ranks_compute(tmp_path: Path) -> None:
    student = write_model(tmp_path, "0123456789+= user assistant")
    teacher = tmp_path / "teacher"
    shutil.copytree(student, teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "model_type": "doge"}))
    with pytest.raises(ConfigError, match="a doge model with a mask") as found:
        check_request(taught(student, path=str(teacher)))
    assert found.value.path == "rl.distillation.path"


def test_teacher_unsupported_by_its_engine_is_refused_early(
    tmp_path: Path,
) -> None:
    student = write_model(tmp_path, "0123456789+= user assistant")
    asked = taught(student, path=str(student), served={})
    check_request(asked)
    # It writes a token behind what it reads, for which a context of 32 has no room.
    with pytest.raises(ConfigError, match="need 33, for answers that fill .* 32") as found:
        check_request(asked.model_copy(update={"rollout_engine": "vllm"}))
    assert found.value.path == "rl.distillation.served"
    check_request(taught(student, path=str(student)).model_copy(update={"rollout_engine": "vllm"}))
    soft = tmp_path / "soft"
    shutil.copytree(student, soft)
    config = json.loads((soft / "config.json").read_text(encoding="utf-8"))
    config["attn_logit_softcapping"] = 50.0
    (soft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for served, path in (({}, "rollout.engine"), (None, "rl.distillation.path")):
        with pytest.raises(ConfigError, match="with a soft cap") as found:
            check_request(taught(student, path=str(soft), served=served))
        assert found.value.path == path


def write_reward_model(model: Path, model_type: str) -> Path:
    """A directory with a head of one score, and a model type."""
    weights = load_file(model / "model.safetensors")
    width = weights["model.norm.weight"].shape[0]
    save_file({**weights, "score.weight": torch.zeros(1, width)}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "model_type": model_type})
    (model / "config.json").write_text(text, encoding="utf-8")
    return model


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_reward_model_unsupported_by_its_backend_is_refused(
    tmp_path: Path, num_rounds: int
) -> None:
    """In a round those are the ranks; an evaluation has a rank of its own for it, of fsdp2."""
    judging = write_reward_model(write_model(tmp_path, "0123456789+= user assistant"), "mistral")
    reward = f"rl.reward={{function: model, model: {{path: {judging}, max_length: 16}}}}"
    rounds = [f"rl.num_rounds={num_rounds}", "training.backend=megatron"]
    found = request_of(load_recipe("quickstart", [reward, *rounds]))
    assert found is not None
    if not num_rounds:
        check_request(found)
        write_reward_model(judging, "doge")
    with pytest.raises(ConfigError, match=r"a (mistral|doge) model") as refused:
        check_request(found)
    assert refused.value.path == "rl.reward.model.path"


@pytest.mark.parametrize("trained", ["rl.critic={}", "reward_model={}"])
def test_no_model_of_values_starts_from_one_that_sees_images(tmp_path: Path, trained: str) -> None:
    (tmp_path / "model").mkdir()
    model = write_chat_model(tmp_path / "model")
    changes = [trained, "model.init=pretrained", f"model.path={model}"]
    changes += ["rl.algorithm.adv_estimator=gae"] if "critic" in trained else []
    if "reward" in trained:
        sources = ("preference", "rl", "evaluation")
        changes += ["sft=null", "data.arithmetic=null"]
        changes += [f"data.{split}=[{{path: owner/{split}}}]" for split in sources]
    found = request_of(load_recipe("quickstart", changes))
    assert found is not None
    with pytest.raises(ConfigError, match="sees images; a value model cannot") as refused:
        check_request(found)
    assert refused.value.path == "model.path"
    check_request(found.model_copy(update={"trains_values": False, "data": None}))
