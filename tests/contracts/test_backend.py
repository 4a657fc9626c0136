"""The contract of a training backend: `pytest tests/contracts/test_backend.py --backend NAME`.

World size 1 runs in this process; world size 2 is one launch of two processes for all cases.
Tolerances: float32 losses and gradient norms 1e-5, against a plain transformers loop. The
gradient norm is compared too, since Adam hides a wrong scale of the gradients.
"""

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engines.checkpoint.export import merge_checkpoint
from engines.config.model import ArchitectureConfig
from engines.models import create_random_model, stored_tensor_names

HERE = Path(__file__).parent
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    """`backend_cases.py`, which is also the program of a rank."""
    spec = importlib.util.spec_from_file_location("backend_cases", HERE / "backend_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["backend_cases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models; 37 rows of vocabulary do not divide over two ranks."""
    root = tmp_path_factory.mktemp("backend")
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"t{i}" for i in range(35))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(root / "tokenizer")
    shape = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "intermediate_size": 96}
    for model_type, tied in (("qwen3", True), ("llama", False)):
        architecture = ArchitectureConfig(model_type=model_type, tie_word_embeddings=tied, **shape)
        create_random_model(architecture, root / "tokenizer", 64, 7, root / model_type)
    return root


@pytest.fixture(scope="module")
def alone(cases: ModuleType, root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results at world size 1."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return cases.run_cases(
            cases.Context(request.config.getoption("--backend", "fsdp2"), root, 0, 1)
        )
    finally:
        torch.set_num_threads(threads)
        cases.collectives.close_process_group()


@pytest.fixture(scope="module")
def pair(alone: dict[str, Any], root: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of both ranks at world size 2, after world size 1 left its checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = request.config.getoption("--backend", "fsdp2")
    argv = [sys.executable, str(HERE / "backend_cases.py"), f"--backend={backend}",
            f"--root={root}", "--world-size=2", f"--port={port}"]  # fmt: skip
    ranks = [
        subprocess.Popen(
            [*argv, f"--rank={rank}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        logs = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(logs)
    files = [root / f"results-2-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(params=[1, 2], ids=["world_size_1", "world_size_2"])
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Rank 0's results at each world size."""
    if request.param == 1:
        yield request.getfixturevalue("alone")
    else:
        yield request.getfixturevalue("pair")[0]


def case(results: dict[str, Any], name: str) -> dict[str, Any]:
    found = results.get(name, {"error": "an earlier case failed"})
    assert "error" not in found, found["error"]
    return found


def columns(rows: list[list[float]], *which: int) -> list[float]:
    return [row[i] for row in rows for i in which]


@pytest.mark.parametrize(("way", "model"), [("plain", "qwen3"), ("llama", "llama")])
def test_trains_as_a_plain_loop_does(
    cases: ModuleType, root: Path, results: dict[str, Any], way: str, model: str
) -> None:
    expected = cases.reference(root / model)
    trained = case(results, "case_trains")[way]
    assert columns(trained, 0) == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert columns(trained, 1) == pytest.approx([norm for _, norm in expected], rel=1e-5)


@pytest.mark.parametrize("way", ["micro_batches", "gradient_checkpointing", "offload"])
def test_the_split_does_not_change_the_result(results: dict[str, Any], way: str) -> None:
    trained = case(results, "case_trains")
    for ours, plain in zip(trained[way], trained["plain"], strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)


def test_bfloat16_stays_close(results: dict[str, Any]) -> None:
    trained = case(results, "case_trains")
    assert columns(trained["bfloat16"], 0) == pytest.approx(columns(trained["plain"], 0), abs=0.03)
    assert columns(trained["bfloat16"], 1) == pytest.approx(columns(trained["plain"], 1), rel=0.05)
    assert trained["bfloat16"] != trained["plain"]


def test_every_rank_reports_the_same(pair: list[dict[str, Any]]) -> None:
    assert case(pair[0], "case_trains") == case(pair[1], "case_trains")


def test_logprobs(cases: ModuleType, root: Path, results: dict[str, Any]) -> None:
    inferred = case(results, "case_infers")
    model = AutoModelForCausalLM.from_pretrained(root / "qwen3", dtype=torch.float32)
    batch = cases.make_batch(0)
    expected, entropies = [], []
    for ids in batch.input_ids_T.split(batch.lengths_B.tolist()):
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        distribution = torch.distributions.Categorical(logits=logits)
        expected += [0.0, *distribution.log_prob(ids[1:]).tolist()]
        entropies += [0.0, *distribution.entropy().tolist()]
    assert inferred["packed"] == pytest.approx(expected, abs=1e-5)
    assert inferred["entropy"] == pytest.approx(entropies, abs=1e-5)
    assert inferred["alone"] == pytest.approx(inferred["packed"], abs=1e-6)
    assert inferred["frozen"] == inferred["packed"]
    assert inferred["small"] == pytest.approx(inferred["packed"], abs=1e-6)
    assert inferred["train_minus_infer"] == 0.0
    assert inferred["masked_are_zero"]


def test_resume_at_the_same_size_is_bitwise(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for size, results in ((1, alone), (2, pair[0])):
        saved = case(results, "case_checkpoints")
        assert saved[f"checkpoint-{size}"] == saved["continued"]
        assert saved[f"checkpoint-{size}-bitwise"]


def test_inference_in_between_changes_nothing(results: dict[str, Any]) -> None:
    saved = case(results, "case_checkpoints")
    unchanged, resumed = saved["after_inference"]["float32"]
    assert unchanged
    assert resumed == saved["continued"]
    unchanged, resumed = saved["after_inference"]["bfloat16"]
    assert unchanged
    assert columns(resumed, 0) == pytest.approx(columns(saved["continued"], 0), abs=0.03)


def test_resume_at_another_size(
    cases: ModuleType,
    alone: dict[str, Any],
    pair: list[dict[str, Any]],
    root: Path,
    request: pytest.FixtureRequest,
) -> None:
    from_one = case(pair[0], "case_checkpoints")["checkpoint-1"]
    for ours, theirs in zip(from_one, case(alone, "case_checkpoints")["continued"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    context = cases.Context(request.config.getoption("--backend", "fsdp2"), root, 0, 1)
    engine = context.engine(load=False)
    engine.load_checkpoint(root / "checkpoint-2")
    from_two = cases.train(context, engine, range(2, cases.NUM_STEPS))
    for ours, theirs in zip(from_two, case(pair[0], "case_checkpoints")["continued"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_weights_only_starts_the_optimizer_anew(results: dict[str, Any]) -> None:
    saved = case(results, "case_checkpoints")
    assert saved["weights_only"][0] == pytest.approx(saved["continued"][0], rel=1e-6)
    assert saved["weights_only"][1][0] != pytest.approx(saved["continued"][1][0], abs=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_streamed_and_merged_weights(
    cases: ModuleType, root: Path, pair: list[dict[str, Any]], size: int, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    streamed = load_file(root / f"final-{size}.safetensors")
    assert sorted(streamed) == stored_tensor_names(root / "qwen3")
    policy = tmp_path / "policy"
    (policy / "hf").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (policy / "hf" / name).write_bytes((root / "qwen3" / name).read_bytes())
    (policy / "checkpoint").symlink_to(root / f"checkpoint-{size}")
    merge_checkpoint(policy, tmp_path / "merged", "float32", 40_000)
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    context = cases.Context(request.config.getoption("--backend", "fsdp2"), root, 0, 1)
    engine = context.engine(load=False)
    engine.load_checkpoint(root / f"checkpoint-{size}")
    held = dict(engine.get_per_tensor_param())
    reloaded = model.state_dict()
    assert all(torch.equal(tensor, reloaded[name]) for name, tensor in held.items())
    ids = torch.arange(3, 15)
    batch = cases.TokenBatch.from_sequences([ids.tolist()])
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[1:, None]).squeeze(1)
    assert torch.allclose(engine.infer_batch(batch).logprobs_T[1:], expected, atol=1e-5)


def test_a_number_that_is_not_finite_stops_every_rank(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for results in (alone, *pair):
        guards = case(results, "case_guards")
        spoiled = {name: text for name, text in guards.items() if "=" in name}
        assert len(spoiled) == 6
        assert set(spoiled.values()) == {"NonFiniteError"}
        assert guards["unchanged"]
        assert "loss_mask is 0" in guards["empty_mask"]
        assert guards["after"] == case(results, "case_trains")["plain"]
