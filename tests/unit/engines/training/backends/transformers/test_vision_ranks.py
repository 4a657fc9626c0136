"""Vision-language models over two ranks, against transformers: a quick launch and a slow one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rlhf.testing.launch import launch
from safetensors.torch import load_file
from vision_cases import (
    NUM_STEPS,
    load,
    make_batch,
    plain_logprobs,
    plain_steps,
    write_vision_model,
)
from vision_ranks import AGAIN, BACKENDS, CASES, QUICK, ROWS

from engines.checkpoint.model_directory import stored_tensor_names
from engines.types import TokenBatch

PROGRAM = Path(__file__).parent / "vision_ranks.py"
DEADLINE_S = 500.0
Case = Callable[[str, str], list[Any]]


def tried(*names: str) -> pytest.MarkDecorator:
    """Parameters `backend` and `name`; slow where it is not among the quick cases."""
    return pytest.mark.parametrize(
        ("backend", "name"),
        [
            pytest.param(
                backend, name, marks=[] if name in QUICK[backend] else [pytest.mark.slow]
            )
            for backend in BACKENDS
            for name in names
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    (root / "model").mkdir()
    write_vision_model(root / "model")
    return root


def results_of(root: Path, tier: str) -> list[dict[str, Any]]:
    """Results of each rank: backend -> case -> what it yields."""
    logs = root / tier
    logs.mkdir()
    launch([str(PROGRAM), f"--root={root}", f"--tier={tier}"], 2, logs, DEADLINE_S)
    files = [root / f"results-{tier}-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(scope="module")
def quick(root: Path) -> list[dict[str, Any]]:
    return results_of(root, "quick")


@pytest.fixture(scope="module")
def slow(root: Path) -> list[dict[str, Any]]:
    return results_of(root, "slow")


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """`case(backend, name)`: what it yields on each rank."""

    def of(backend: str, name: str) -> list[Any]:
        tier = "quick" if name in QUICK[backend] else "slow"
        return [results[backend][name] for results in request.getfixturevalue(tier)]

    return of


def batches(name: str) -> list[TokenBatch]:
    """The sequences of both ranks, for each step."""
    rows = CASES[name][0]
    own = AGAIN.get(rows)
    chosen = range(sum(map(len, ROWS[rows]))) if own is None else [i for one in own for i in one]
    wholes = [make_batch(step, [each for one in ROWS[rows] for each in one])
              for step in range(NUM_STEPS)]  # fmt: skip
    return [whole.select(chosen) for whole in wholes]


def check_steps(steps: list[list[float]], expected: list[tuple[float, float]]) -> None:
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in expected], rel=1e-4)


@tried(*sorted(CASES.keys() - {"bfloat16", "shared_bfloat16", "lora"}))
def test_trains_as_a_plain_loop_does(case: Case, root: Path, backend: str, name: str) -> None:
    model = load(root / "model")
    with torch.no_grad():
        logprobs = torch.cat(plain_logprobs(model, batches(name)[0]))
    logprobs *= batches(name)[0].columns["loss_mask"]
    found = case(backend, name)
    assert found[0]["logprobs"] + found[1]["logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-5)
    frozen = name.endswith("frozen")
    expected = plain_steps(
        model, batches(name), trained=lambda key: not (frozen and ".visual." in key)
    )
    for result in found:
        check_steps(result["steps"], expected)


@tried("lora")
def test_an_adapter_trains_as_peft_does(case: Case, root: Path, backend: str, name: str) -> None:
    found = case(backend, name)
    theirs = PeftModel.from_pretrained(
        load(root / "model"), root / f"adapter-{backend}", is_trainable=True
    )
    expected = plain_steps(
        theirs.base_model.model, batches(name), trained=lambda key: ".lora_" in key
    )
    check_steps(found[0]["steps"], expected)


@tried("bfloat16", "shared_bfloat16")
def test_low_precision_is_near(case: Case, root: Path, backend: str, name: str) -> None:
    steps = case(backend, name)[0]["steps"]
    expected = plain_steps(load(root / "model"), batches(name))
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected], abs=0.1)


@tried("mixed")
def test_exported_weights_are_those_of_the_plain_loop(
    case: Case, root: Path, backend: str, name: str
) -> None:
    assert case(backend, name)
    exported = load_file(root / f"exported-{backend}.safetensors")
    assert sorted(exported) == stored_tensor_names(root / "model")
    model = load(root / "model")
    plain_steps(model, batches(name))
    model.save_pretrained(root / f"plain-{backend}")
    plain = load_file(root / f"plain-{backend}" / "model.safetensors")
    for key, tensor in exported.items():
        assert torch.allclose(tensor, plain[key], atol=1e-3), key


@tried("continued")
def test_a_checkpoint_continues(case: Case, backend: str, name: str) -> None:
    straight, restarted = case(backend, name)[0]
    assert restarted == straight


@tried("refused")
def test_every_rank_names_the_sequence_that_does_not_fit(
    case: Case, backend: str, name: str
) -> None:
    said = case(backend, name)
    assert said[0] == said[1]
    assert said[0].startswith("sequence 1 of data-parallel rank 1 has 9 image placeholder tokens")
