"""Top-k distillation through `train_batch`: whole logits, a teacher's own numbers, and memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_cases import (
    TEMPERATURE,
    VOCABULARY,
    make_engine,
    plainly,
    steps_of,
    taught,
    write_models,
)
from distillation_ranks import LAYOUTS, NUM_TOP
from rlhf.testing.launch import launch
from rlhf.testing.plain_loop import load, make_batch
from rlhf.testing.saved_tensors import LargestStorage
from transformers import AutoConfig, AutoModelForCausalLM

from engines import collectives
from engines.algorithms.distillation import TopKDistillation
from engines.errors import EngineError
from engines.training.model import linear_tiles
from engines.training.outputs import model_outputs
from engines.types import Readouts, TokenBatch

PROGRAM = Path(__file__).parent / "distillation_ranks.py"
DEADLINE_S = 500.0
FIRST, LOSS, NORM = 1e-5, 5e-5, 1e-4
"""Relative of the first step; of all, after what the optimizer makes of rounding."""
BACKENDS = pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    collectives.close_process_group()


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tiles, "DEFAULT_CHUNK_ELEMENTS", 60)
    monkeypatch.setattr(linear_tiles, "_MIN_ROWS", 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distillation")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def plain(root: Path) -> dict[str, Any]:
    """By K, the steps of all logits."""
    return {str(num_top): plainly(root, num_top) for num_top in (VOCABULARY, NUM_TOP)}


def check(found: list[Any], expected: list[Any]) -> None:
    assert expected[0][0] > 0.5, "student and teacher are far apart"
    assert found[0] == pytest.approx(expected[0], rel=FIRST)
    assert [loss for loss, _ in found] == pytest.approx([x for x, _ in expected], abs=LOSS)
    assert [norm for _, norm in found] == pytest.approx([x for _, x in expected], rel=NORM)


@BACKENDS
@pytest.mark.parametrize("num_top", [VOCABULARY, NUM_TOP])
@pytest.mark.usefixtures("_small_tiles")
def test_on_one_rank_it_trains_as_all_logits_do(
    root: Path, plain: dict[str, Any], backend: str, num_top: int
) -> None:
    shape = {"backend": backend, "max_tokens_per_micro_batch": 24}
    teacher = make_engine(root / "teacher", frozen=True, **shape)
    check(steps_of(make_engine(root / "student", **shape), teacher, num_top), plain[str(num_top)])


@BACKENDS
@pytest.mark.usefixtures("_small_tiles")
def test_in_bfloat16_a_student_that_is_its_teacher_stays(root: Path, backend: str) -> None:
    shape = {"backend": backend, "max_tokens_per_micro_batch": 24, "dtype": "bfloat16"}
    student = make_engine(root / "student", **shape)
    teacher = make_engine(root / "student", frozen=True, **shape)
    batch = taught(teacher, make_batch(0), NUM_TOP)
    update = student.train_batch(batch, TopKDistillation())
    assert (update.loss, update.grad_norm) == (0.0, 0.0)
    other = taught(make_engine(root / "teacher", frozen=True, **shape), make_batch(0), NUM_TOP)
    assert student.train_batch(other, TopKDistillation()).loss > 0.1


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    launch([str(PROGRAM), f"--root={root}"], 2, root, DEADLINE_S)
    files = [root / f"results-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def of(results: dict[str, Any], layout: str) -> dict[str, Any]:
    found = results.get(layout, {"error": "an earlier layout failed"})
    assert "error" not in found, found["error"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_two_ranks(
    ranks: list[dict[str, Any]], root: Path, plain: dict[str, Any], layout: str
) -> None:
    one, other = (of(results, layout) for results in ranks)
    assert one == other
    for num_top in (VOCABULARY, NUM_TOP):
        check(one[str(num_top)], plain[str(num_top)])
    assert one["of itself"] == [0.0, 0.0]
    assert one["asked alike"]
    assert one["sampled alike"]
    ids, logprobs = likeliest(root / "teacher", make_batch(0))
    assert one["ids"] == ids
    torch.testing.assert_close(torch.tensor(one["logprobs"]), logprobs, rtol=0, atol=2e-5)


def likeliest(model_dir: Path, batch: TokenBatch) -> tuple[list[list[int]], torch.Tensor]:
    """By definition; zeros at the first token of each sequence."""
    model, ids, logprobs = load(model_dir), [], []
    for tokens in batch.input_ids_T.split(batch.lengths_B.tolist()):
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
        top = logits.log_softmax(dim=1).topk(NUM_TOP, dim=1)
        ids += [[0] * NUM_TOP, *top.indices.tolist()]
        logprobs += [[0.0] * NUM_TOP, *top.values.tolist()]
    return ids, torch.tensor(logprobs)


WORDS, CHUNK = 4096, 1 << 14


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many words and a narrow model: only logits are large."""
    path = tmp_path_factory.mktemp("wide")
    config = AutoConfig.for_model(
        "llama", vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=16, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_logits_of_all_tokens_ever_live(
    wide_dir: Path, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str
) -> None:
    """Every storage that a teacher's pass and a whole step of the student make, is measured."""
    ids = [[(7 * row + t) % WORDS for t in range(17)] for row in range(32)]
    batch = TokenBatch.from_sequences(ids, loss_mask=[[0.0] + [1.0] * 16] * 32)
    shape = {"backend": backend, "dtype": dtype, "max_tokens_per_micro_batch": 32 * 17}
    all_logits = 2 * 32 * 16 * WORDS  # of bfloat16; of float32 it is the more

    def largest(chunk_elements: int) -> int:
        monkeypatch.setattr(linear_tiles, "DEFAULT_CHUNK_ELEMENTS", chunk_elements)
        student = make_engine(wide_dir, **shape)
        teacher = make_engine(wide_dir, frozen=True, **shape)
        student.train_batch(taught(teacher, batch, 8), TopKDistillation())
        with LargestStorage() as seen:
            student.train_batch(taught(teacher, batch, 8), TopKDistillation())
        return seen.num_bytes

    weights = 4 * 16 * WORDS
    assert largest(CHUNK) <= max(2 * weights, 8 * CHUNK) < all_logits / 4
    # The same gauge where one tile holds them all, so that the figure above means something.
    assert largest(1 << 30) >= all_logits


def test_what_cannot_be_read_is_refused_by_name(root: Path) -> None:
    with pytest.raises(ValueError, match="logprobs_of='x' and num_top=3; need one of them"):
        Readouts(logprobs_of="x", num_top=3)
    engine, batch = make_engine(root / "student"), make_batch(0)
    with pytest.raises(EngineError, match="got none as column 'teacher_topk_ids'"):
        engine.train_batch(batch, TopKDistillation())
    floats = batch.with_columns(ids=torch.zeros(batch.num_tokens, 2))
    with pytest.raises(EngineError, match=r"torch.float32 as column 'ids'; need token ids"):
        engine.infer_batch(floats, Readouts(logprobs_of="ids"))
    with pytest.raises(ValueError, match="got 38; need 1 to 37"):
        engine.infer_batch(batch, Readouts(num_top=38))
    whole = make_engine(root / "student", chunked_logprobs=False)
    with pytest.raises(EngineError, match="training.chunked_logprobs is false"):
        whole.infer_batch(batch, Readouts(num_top=3))
    with pytest.raises(EngineError, match=r"gave 1 values per token; .* needs 7"):
        model_outputs(
            torch.zeros(1, batch.num_tokens + 1), batch, Readouts(num_top=3), "language_model"
        )


def test_a_model_that_reworks_its_logits_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "granite", vocab_size=37, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, logits_scaling=8.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="the architecture sets logits_scaling"):
        make_engine(tmp_path).infer_batch(make_batch(0), Readouts(num_top=3))
