"""What the backends with job environments refuse, and what stands around them here.

That they train as the others do is the contract tests' work, inside their environments.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engines.config.backends import BACKENDS, ENGINES
from engines.config.plugins import register_plugin
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.backends.mindspeed.engine import MindSpeedMegatronEngine, mindspeed_arguments
from engines.training.backends.transformers.module_engine import make_adamw
from engines.training.base import create_engine
from engines.training.spec import EngineSpec
from engines.training.step.optimizer_step import clip_across_meshes
from hardware.cpu import CPUPlatform
from infra import job_environments
from infra.errors import ConfigError

OWN = [name for name, backend in BACKENDS.items() if backend.environment is not None]


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of job environments."""
    monkeypatch.setattr(job_environments, "ENVIRONMENTS_DIR", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", OWN)
def test_a_missing_environment_is_one_line(name: str, environments: Path) -> None:
    line = f"training.backend: {name} needs the job environment {name}: make env-{name}"
    with pytest.raises(ConfigError) as caught:
        ENGINES.find(name)
    assert str(caught.value) == line
    with pytest.raises(ConfigError) as caught:
        create_engine(
            "language_model", Path("/x"), TrainingConfig(backend=name), None, 1, CPUPlatform(), 0
        )
    assert str(caught.value) == line


@pytest.mark.parametrize("name", OWN)
def test_an_environment_gives_the_interpreter(name: str, environments: Path) -> None:
    python = environments / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert ENGINES.interpreter(name, "training.backend") == python
    assert ENGINES.find(name).environment
    with pytest.raises(ConfigError, match="a job environment of its own, not in this one"):
        create_engine(
            "language_model", Path("/x"), TrainingConfig(backend=name), None, 1, CPUPlatform(), 0
        )


@pytest.mark.parametrize("name", ["fsdp2", "megatron", "somebody-elses"])
def test_the_other_backends_run_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("backend", "somebody-elses", "x:Y")
    assert ENGINES.interpreter(name, "training.backend") is None


def test_what_is_installed_in_an_environment(environments: Path) -> None:
    site = environments / "e" / "lib" / "python3.11" / "site-packages"
    for name, version in (("torch", "2.13.0"), ("veomni", "0.1.12")):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    found = job_environments.installed_distributions(environments / "e" / "bin" / "python")
    assert found == {"torch": "2.13.0", "veomni": "0.1.12"}
    assert not job_environments.is_inside()


def test_clipping_matches_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for max_norm in (0.5, 100.0):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        norm = clip_across_meshes([*ours, torch.nn.Parameter(torch.zeros(1))], max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert norm == pytest.approx(float(expected), rel=1e-6)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-6)  # pyright: ignore[reportArgumentType]


def test_decay_stays_with_its_group() -> None:
    named = [
        ("norm", torch.nn.Parameter(torch.ones(3))),
        ("weight", torch.nn.Parameter(torch.ones(3, 3))),
    ]
    optimizer = make_adamw(named, {"weight"}, OptimizerConfig(weight_decay=0.25))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decay[id(p)] for _, p in named] == [0.0, 0.25]


def test_megatron_on_npu_is_mindspeed() -> None:
    for name in ("megatron", "megatron.value_model"):
        assert ENGINES.load(name, device="npu", vendor="huawei") is MindSpeedMegatronEngine
    assert BACKENDS["megatron"].devices["npu"].value == "registry"


def test_mindspeed_is_told_the_layout_and_the_operators() -> None:
    told = mindspeed_arguments(
        TrainingConfig(
            backend="megatron",
            num_workers=8,
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            context_parallel_size=2,
            options={"fused_swiglu": False},
        )
    )
    assert told == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "sequence_parallel": True,
        "context_parallel_algo": "megatron_cp_algo",
        "use_flash_attn": False,
        "use_fused_rmsnorm": True,
        "use_fused_swiglu": False,
        "use_fused_rotary_pos_emb": True,
        "use_ascend_mc2": False,
    }
    with pytest.raises(ConfigError, match="training.options.transformer_engine: got true"):
        mindspeed_arguments(
            TrainingConfig(backend="megatron", options={"transformer_engine": True})
        )


def test_mindspeed_is_told_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptor is a stand-in: the real one needs the device's toolkit."""
    adaptor = ModuleType("mindspeed.megatron_adaptor")
    heard: list[str] = []
    monkeypatch.setattr(
        adaptor, "repatch", lambda arguments: heard.append("repatch"), raising=False
    )
    monkeypatch.setitem(sys.modules, "mindspeed", ModuleType("mindspeed"))
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", adaptor)
    base = MindSpeedMegatronEngine.__mro__[1]
    monkeypatch.setattr(base, "initialize", lambda self, load_weights: heard.append("build"))
    config = TrainingConfig(backend="megatron")
    MindSpeedMegatronEngine(
        EngineSpec(Path("/x"), config, OptimizerConfig(), 1, CPUPlatform(), 0)
    ).initialize()
    assert heard == ["repatch", "build"]


def test_without_mindspeed_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed", None)
    spec = EngineSpec(
        Path("/x"), TrainingConfig(backend="megatron"), OptimizerConfig(), 1, CPUPlatform(), 0
    )
    with pytest.raises(ConfigError, match="training.backend: megatron on npu needs MindSpeed"):
        MindSpeedMegatronEngine(spec).initialize()
