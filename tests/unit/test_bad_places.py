"""What a bad model, checkpoint, machine or service costs: one line that names it.

Recipes and rows of data are in `test_bad_inputs.py` and `test_bad_files.py`; other tests of such a
row are named after it too, `test_bad_input_row_40_...`, where its part is tested.
"""

import json
import logging
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.checkpoint.model_directory import check_finite, create_random_model, num_parameters
from engines.checkpoint.sharded import load_sharded, own_regions, save_regions
from engines.checkpoint.step_store import TRAINER_NAME, StepCheckpoints, TrainerState
from engines.config.model import ArchitectureConfig, ModelConfig, TokenizerConfig
from engines.config.preflight_request import PreflightRequest
from engines.config.training import HardwareConfig, LoraConfig, TrainingConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.errors import CheckpointError
from engines.jobs.preflight.models import BYTES_PER_PARAMETER, checkpoint_bytes
from engines.jobs.process.policy import initial_source
from flows import machine_survey
from flows import preflight as checks
from flows.machine_survey import check_devices, memory_shortage
from flows.preflight import check_tracking_database, preflight, request_of
from flows.recipe.recipe import load_recipe
from flows.stage_order import run_stages
from infra.errors import ArtifactError, ConfigError
from infra.ray import cluster
from infra.store.artifacts import MANIFEST_NAME
from infra.store.storage import LocalStorage
from infra.survey_report import FoundPlatform
from tests.unit.flows.test_plan import Stages
from tests.unit.flows.test_plan import recipe as recipe_in

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TokenizerConfig(), ["0123"], root / "tokenizer", max_length=64)
    shape = ArchitectureConfig(hidden_size=16, head_dim=4, intermediate_size=24)
    create_random_model(shape, tokenizer, 64, 0, root / "m")
    return root / "m"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_input_row_34_weights_that_are_not_finite(
    whole: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = shutil.copytree(whole, tmp_path / "m")
    check_finite(model)
    weights = {name: t.to(dtype) for name, t in load_file(model / "model.safetensors").items()}
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name].view(-1)[3], weights[name].view(-1)[5] = torch.nan, torch.inf
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        initial_source(ModelConfig(path=str(model), max_length=16), model, tmp_path, 0, tmp_path)
    assert str(refused.value) == (
        f"model.path: {model}: {name} holds 2 non-finite values; need finite ones; copy the model "
        "again, or take an earlier checkpoint of it"
    )


def test_bad_input_row_39_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    """Neither the optimizer nor the cursor begins anew unasked."""
    weights = {"model.w": torch.ones(4)}
    (tmp_path / "tensors").mkdir()
    save_regions(tmp_path / "tensors", own_regions(weights))
    with pytest.raises(CheckpointError, match=r"cannot load .*optimizer\.exp_avg\.w"):
        load_sharded(tmp_path / "tensors", {**weights, "optimizer.exp_avg.w": torch.zeros(4)})
    steps = StepCheckpoints(tmp_path / "steps", keep=2)
    steps.save(3, lambda path: (path / "engine").write_text("x"), TrainerState(3, {"row": 24}))
    state = tmp_path / "steps/step-00000003" / TRAINER_NAME
    state.unlink()
    with pytest.raises(CheckpointError, match=rf"step-00000003.*{re.escape(state.name)}"):
        steps.latest_valid()


def test_bad_input_row_40_a_step_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    steps = StepCheckpoints(tmp_path, keep=2)
    steps.save(3, lambda path: (path / "engine").write_text("x"), TrainerState(3))
    manifest = tmp_path / "step-00000003" / MANIFEST_NAME
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": 3, "new": 1}))
    with pytest.raises(ArtifactError, match=r"step-00000003.* has schema 3; this code reads <= 1"):
        steps.latest_valid()


def test_bad_input_row_43_too_little_room_for_checkpoints(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    storage = LocalStorage(tmp_path / "store")
    pretrained = ["model.init=pretrained", f"model.path={whole}"]
    asked = recipe_in(storage, *pretrained)
    assert num_parameters(whole) == sum(
        weight.numel() for weight in load_file(whole / "model.safetensors").values()
    )
    need = 2 * num_parameters(whole) * BYTES_PER_PARAMETER
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(need, 0, need))
    preflight(asked)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(need, 1, need - 1))
    with pytest.raises(ConfigError) as refused:
        preflight(asked)
    assert str(refused.value) == (
        f"location.store: need 2 x {need / 2e9:.1f} GB for checkpoints of {whole}, {storage.uri} "
        f"has {(need - 1) / 1e9:.1f} GB free; free some, or name another place"
    )
    averaged = recipe_in(storage, *pretrained, "sft.optimizer.ema={}")
    found = [checkpoint_bytes(each) for each in map(request_of, (asked, averaged)) if each]
    assert [2 * (each or 0) for each in found] == [need, need * 16 // 12]
    adapted = TrainingConfig(lora=LoraConfig())
    assert (
        checkpoint_bytes(PreflightRequest(model=asked.model, data=asked.data, training=adapted))
        is None
    )


def test_only_a_stage_that_is_to_train_needs_room(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 0, 1))
    storage = LocalStorage(tmp_path / "store")
    asked = recipe_in(storage, "model.init=pretrained", f"model.path={whole}")
    asked = asked.model_copy(update={"training": asked.training.on(accelerator=False)})
    with pytest.raises(InterruptedError):
        run_stages(asked, Stages(storage, fails="rl_round_1"), lambda _: None)
    with pytest.raises(ConfigError, match="GB for checkpoints"):
        preflight(asked)
    with pytest.raises(InterruptedError):
        run_stages(asked, Stages(storage, fails="merge"), lambda _: None)
    assert preflight(asked).model.path == str(whole), "a merge writes no checkpoint"
    preflight(asked, {"merge": "token"})
    with pytest.raises(ConfigError, match="GB for checkpoints"):
        preflight(asked, {"rl_round_1": "token"})


def test_bad_input_row_43_too_little_memory(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    need = num_parameters(whole) * BYTES_PER_PARAMETER
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_survey, "_MEMORY_LIMITS", (tmp_path / "absent", limit))
    asked = recipe_in(
        LocalStorage(tmp_path / "store"), "model.init=pretrained", f"model.path={whole}"
    )
    for fits in ("max\n", f"{need}\n"):
        limit.write_text(fits)
        preflight(asked)
    limit.write_text(f"{need - 1}\n")
    with pytest.raises(ConfigError) as refused:
        preflight(asked)
    assert str(refused.value) == (
        f"model.path: got {whole}: need more than {need / 1e9:.1f} GB of memory for weights and "
        f"optimizer, this machine has {(need - 1) / 1e9:.1f} GB; take a smaller model or "
        "training.lora, or set RAY_ADDRESS to a cluster"
    )
    elsewhere = HardwareConfig(platform="nvidia", device_kind="H100")
    assert not memory_shortage(2**62, elsewhere)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert not memory_shortage(2**62, HardwareConfig(platform="cpu", device_kind="x86"))


def test_bad_input_row_43_a_device_too_small(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for name in ("RAY_ADDRESS", "RLHF_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    storage = LocalStorage(tmp_path / "store")
    asked = recipe_in(storage, "model.init=pretrained", f"model.path={whole}")
    asked = asked.model_copy(update={"hardware": HardwareConfig(platform="nvidia")})
    need = 16 * num_parameters(whole)  # weights, gradients and two moments in float32

    def surveyed(num_bytes: int) -> FoundPlatform:
        return FoundPlatform(
            name="nvidia", device="cuda", reason="here", label="H100", num_devices=1,
            memory_bytes=num_bytes,
        )  # fmt: skip

    monkeypatch.setattr(machine_survey, "surveyed", lambda *_: surveyed(need))
    monkeypatch.setattr(checks, "surveyed", lambda *_: surveyed(need))
    preflight(asked)
    monkeypatch.setattr(checks, "surveyed", lambda *_: surveyed(need - 1))
    with pytest.raises(ConfigError, match=r"model.path: got .* needs 0.0 GB on each rank for"):
        preflight(asked)
    complete = {"hardware": HardwareConfig(platform="nvidia", device_kind="H100")}
    preflight(asked.model_copy(update=complete))  # may be for another machine
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    preflight(asked)


def test_bad_input_row_43_too_few_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda pid: set(range(6)))
    cpu = HardwareConfig(platform="cpu", device_kind="x86")
    check_devices(6, cpu, tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_devices(7, cpu, tmp_path)
    assert str(refused.value) == (
        "training.num_workers: got 7; Ray counts 6 CPUs here, one for each; lower it, or set "
        "RAY_ADDRESS to a cluster with more"
    )
    surveyed = FoundPlatform(
        name="nvidia", device="cuda", reason="here", label="H100", num_devices=4
    )
    monkeypatch.setattr(machine_survey, "surveyed", lambda *_: surveyed)
    nvidia = HardwareConfig(platform="nvidia", device_kind="H100")
    check_devices(4, nvidia, tmp_path)
    with pytest.raises(ConfigError, match=r"got 8; this machine has 4 \(H100\)"):
        check_devices(8, nvidia, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    check_devices(8, nvidia, tmp_path)


def test_bad_input_row_44_a_database_of_runs_on_a_network_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.file_system_of(Path("/proc/self")) == "proc"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\n"
        f"server:/x {tmp_path}/with\\040blank nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/with\\040blank/fast tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(checks, "MOUNTS", mounts)
    shared = f"sqlite:///{tmp_path}/with blank/mlflow.db"
    with pytest.raises(ConfigError) as refused:
        check_tracking_database(shared)
    assert str(refused.value) == (
        f"location.tracking_uri: got {shared}, which is on nfs4; sqlite needs a local disk; set "
        "it, or MLFLOW_TRACKING_URI, to a server"
    )
    for fine in (f"{tmp_path}/with blank/fast/x.db", f"{tmp_path}/with blanks/x.db"):
        check_tracking_database(f"sqlite:///{fine}")
    check_tracking_database("http://mlflow:5000")


def test_bad_input_row_45_a_token_that_others_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "ray_token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert cluster._token_file(tmp_path) == token
    said = [each.getMessage() for each in caplog.records if each.name == cluster.__name__]
    assert said == [f"{token} was readable by others; it is private now"]
    assert token.stat().st_mode & 0o777 == 0o600


def test_bad_input_row_46_programs_that_a_model_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe("quickstart", ["rl.reward.function=code"])
    assert str(refused.value) == (
        "rl.reward.function: got code, which runs programs that a model wrote; need a sandbox, "
        "which this project lacks; set it to http, and kwargs.url to your own sandbox"
    )
