"""Every built-in backend reproduces the committed loss curves; so do two loops of plain torch."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rlhf.testing.launch import launch
from rlhf.testing.plain_loop import adamw, take_step
from rlhf.testing.tiny_models import write_tiny_models
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engines.config.backends import BACKENDS

PROGRAM = Path(__file__).with_name("curves.py")
DEADLINE_S = 300.0
TOLERANCE = 1e-4
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {}),
    ("fsdp2", {}),
    ("fsdp2", {"ulysses_size": 2}),
    ("megatron", {}),
    ("megatron", {"tensor_parallel_size": 2}),
    ("megatron", {"pipeline_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", PROGRAM)
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
def golden(program: ModuleType) -> dict[str, list[list[float]]]:
    return json.loads(program.GOLDEN.read_text(encoding="utf-8"))


def check(found: dict[str, Any], golden: dict[str, list[list[float]]]) -> None:
    assert found.keys() == golden.keys()
    for name, steps in golden.items():
        for ours, theirs in zip(found[name], steps, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=TOLERANCE), name
            assert ours[1] == pytest.approx(theirs[1], rel=TOLERANCE), name


def test_plain_torch_gives_the_golden_curves(
    program: ModuleType, models: Path, golden: dict[str, list[list[float]]]
) -> None:
    found = {"sft": plain_curve(program, models, sft_loss), "grpo": plain_grpo(program, models)}
    check(found, golden)


def plain_grpo(program: ModuleType, models: Path) -> list[tuple[float, float]]:
    old: list[Tensor] = []

    def loss(program: ModuleType, logits: list[Tensor], rows: list[Any]) -> Tensor:
        if not old:
            old.extend(
                logprobs(x, ids).detach() for x, (ids, _, _) in zip(logits, rows, strict=True)
            )
        return grpo_loss(program, logits, rows, old)

    return plain_curve(program, models, loss)


def plain_curve(
    program: ModuleType, models: Path, loss_of: Callable[..., Tensor]
) -> list[tuple[float, float]]:
    """Steps of a plain loop, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32)
    optimizer = adamw(model, lr=3e-3, eps=1e-8)
    batch = program.samples()
    lengths = batch.lengths_B.tolist()
    rows = list(
        zip(
            batch.input_ids_T.split(lengths),
            batch.columns["loss_mask"].split(lengths),
            batch.columns["advantages"].split(lengths),
            strict=True,
        )
    )
    steps = []
    for _ in range(program.NUM_STEPS):
        logits = [model(input_ids=ids[None]).logits[0, :-1] for ids, _, _ in rows]
        steps.append(take_step(optimizer, loss_of(program, logits, rows)))
    return steps


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def sft_loss(program: ModuleType, logits: list[Tensor], rows: list[Any]) -> Tensor:
    total = sum(int(mask.sum()) for _, mask, _ in rows)
    return torch.stack(
        [
            (cross_entropy(x, ids[1:], reduction="none") * mask[1:]).sum() / total
            for x, (ids, mask, _) in zip(logits, rows, strict=True)
        ]
    ).sum()


def grpo_loss(
    program: ModuleType, logits: list[Tensor], rows: list[Any], old: list[Tensor]
) -> Tensor:
    """Token mean of PPO-clip (dual clip at 3) - entropy bonus + k3 to the start."""
    total = sum(int(mask.sum()) for _, mask, _ in rows)
    loss = torch.zeros(())
    for x, (ids, mask, advantage), before in zip(logits, rows, old, strict=True):
        new = logprobs(x, ids)
        ratio, advantage = (new - before).exp(), advantage[1:]
        clip = program.GRPO.clip_ratio
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, 3.0 * advantage), surrogate)
        k3 = (before - new).exp() - 1 - (before - new)
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
        token = -surrogate - 0.001 * entropy + 0.05 * k3
        loss = loss + (token * mask[1:]).sum() / total
    return loss


@pytest.mark.parametrize(
    ("backend", "training"), LAYOUTS, ids=[f"{b}-{'-'.join(t) or 'data'}" for b, t in LAYOUTS]
)
def test_every_backend_gives_the_golden_curves(
    backend: str,
    training: dict[str, Any],
    models: Path,
    golden: dict[str, list[list[float]]],
    tmp_path: Path,
) -> None:
    if backend not in BACKENDS:
        pytest.fail(f"{backend} is not registered")
    launch(
        [
            str(PROGRAM), f"--models={models}", f"--backend={backend}", f"--out={tmp_path}",
            f"--training={json.dumps(training)}",
        ],
        2, tmp_path, DEADLINE_S,
    )  # fmt: skip
    for rank in range(2):
        check(json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")), golden)
