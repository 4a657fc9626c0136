"""Every policy loss has one gradient: plain transformers', under every layout and cut."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rlhf.testing.launch import launch
from rlhf.testing.plain_loop import load
from rlhf.testing.tiny_models import write_tiny_models
from safetensors.torch import load_file
from torch import Tensor

from engines.config.rows import POLICY_LOSSES
from engines.config.training import TrainingConfig
from engines.training.base import create_engine
from engines.types import GlobalCounts, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

PROGRAM = Path(__file__).with_name("loss_gradients.py")
DEADLINE_S = 400.0
TOLERANCE = 1e-5
NUM_MANY = 256
MORE_THAN_ONE = 1.2
LAYOUTS = {
    "alone": ("fsdp2", 1, "{}"),
    "four ranks": ("fsdp2", 4, "{}"),
    "ulysses 2": ("fsdp2", 2, '{"ulysses_size": 2}'),
    "tensor 2 x pipeline 2": (
        "megatron", 4, '{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loss_gradients", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_tiny_models(path)
    return path


@pytest.fixture(scope="module")
def plain(program: ModuleType, models: Path) -> dict[str, dict[str, Tensor]]:
    """By loss and weight, in float64, of one sequence at a time; leaves the logprobs behind."""
    model = load(models / "qwen3").double()
    batch = program.samples()
    with torch.no_grad():
        logprobs_T = outputs_of(model, batch).logprobs_T
    torch.save(logprobs_T.float(), models / "logprobs.pt")
    return plain_gradients(program, model, program.with_old_logprobs(batch, logprobs_T.float()))


def plain_gradients(
    program: ModuleType, model: torch.nn.Module, batch: TokenBatch
) -> dict[str, dict[str, Tensor]]:
    """By loss and weight, with the model's own autograd."""
    mask_T, found = batch.columns["loss_mask"], {}
    for name in POLICY_LOSSES.names():
        loss_fn = program.objective(name)
        extras = loss_fn.extras(batch, lambda own_N: own_N.double())
        num_sequences = batch.num_sequences
        counts = GlobalCounts(int(mask_T.sum()), num_sequences, num_sequences, extras)
        model.zero_grad()
        loss_fn(outputs_of(model, batch), batch, counts).loss.backward()
        found[name] = {
            key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None
        }
    return found


def outputs_of(model: torch.nn.Module, batch: TokenBatch) -> ModelOutputs:
    """Log-probabilities and entropies by torch's own distribution; 0 at first tokens."""
    logprobs, entropies = [], []
    for ids in batch.input_ids_T.split(batch.lengths_B.tolist()):
        distribution = torch.distributions.Categorical(
            logits=model(input_ids=ids[None]).logits[0, :-1]
        )
        zero = torch.zeros(1, dtype=torch.float64)
        logprobs += [zero, distribution.log_prob(ids[1:])]
        entropies += [zero, distribution.entropy()]
    return ModelOutputs(torch.cat(logprobs), torch.cat(entropies))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_has_the_gradient_of_plain_transformers(
    layout: str,
    program: ModuleType,
    models: Path,
    plain: dict[str, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    backend, world_size, training = LAYOUTS[layout]
    arguments = {
        "models": models, "batch": models / "logprobs.pt", "out": tmp_path / "found.safetensors",
        "backend": backend, "training": training,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in arguments.items()]
    launch([str(PROGRAM), *argv], world_size, tmp_path, DEADLINE_S)
    errors = program.relative_errors(load_file(tmp_path / "found.safetensors"), plain)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.stacks
def test_many_micro_batches_in_bfloat16_cost_no_accuracy(
    program: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 256 micro-batches the gradient is as near to float64 as that of one: sums are float32."""
    monkeypatch.setattr(program, "NUM_SEQUENCES", NUM_MANY)
    model, batch = load(models / "qwen3").double(), program.samples()
    with torch.no_grad():
        logprobs_T = outputs_of(model, batch).logprobs_T
    batch = program.with_old_logprobs(batch, logprobs_T.float())
    plain, errors = plain_gradients(program, model, batch), {}
    for num_micro in (1, NUM_MANY):
        config = TrainingConfig(
            backend="fsdp2",
            dtype="bfloat16",
            max_tokens_per_micro_batch=batch.num_tokens // num_micro,
        )
        engine = create_engine(
            "language_model", models / "qwen3", config, program.OPTIMIZER, 10, CPUPlatform(), 0
        )
        engine.initialize()
        start = tmp_path / f"start-{num_micro}"
        start.mkdir()
        engine.save_checkpoint(start, 0)
        for name, wanted in plain.items():
            engine.load_checkpoint(start)
            ours = program.gradients(engine, name, batch, num_micro)
            gaps = torch.stack([(ours[key] - wanted[key]).norm() for key in wanted])
            size = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
            errors.setdefault(name, []).append(float(gaps.norm() / size))
    assert all(1e-5 < one < 0.1 for one, _ in errors.values()), errors
    assert all(many <= MORE_THAN_ONE * one for one, many in errors.values()), errors
