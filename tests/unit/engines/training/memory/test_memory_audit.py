"""What the audit counts against formulas, and against the resident memory of the process."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_formulas import fsdp2_bucket_bytes, saved_bytes, state_bytes
from memory_ranks import (
    EXACT_MALLOC,
    LARGE,
    SIZES,
    SMALL,
    TOKENS,
    audited,
    draw_batch,
    likelihood,
    make_engine,
)
from rlhf.testing.forked import start_python, start_python_anew
from rlhf.testing.launch import launch

from engines.collectives import close_process_group
from engines.errors import EngineError
from engines.training.backends.transformers.module_engine import ModuleEngine
from engines.training.engine_backend import EngineBackend
from engines.training.memory_audit import MemoryAudit
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

PREDICTED = TOKENS - 2
TOLERANCE = 0.05
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def small(make_model: MakeModel) -> Path:
    return make_model("qwen3", **SMALL.config)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    close_process_group()


def expected(backend: str, *, recompute: bool, num_ranks: int = 1) -> dict[str, int]:
    saved = saved_bytes(SMALL, backend, tokens=TOKENS, predicted=PREDICTED, recompute=recompute)
    return {**state_bytes(SMALL, backend, num_ranks), "saved_bytes": saved}


def counted(found: dict[str, Any]) -> dict[str, int]:
    """Without the buckets."""
    return {name: found[name] for name in expected("fsdp2", recompute=False)}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("num_micro_batches", "num_steps"), SIZES)
def test_the_audit_counts_what_the_formulas_say(
    num_micro_batches: int, num_steps: int, recompute: bool, small: Path
) -> None:
    engine = make_engine(small, gradient_checkpointing=recompute)
    found = audited(engine, num_micro_batches, num_steps)
    wanted = expected("fsdp2", recompute=recompute)
    assert counted(found["train"]) == wanted
    idle = {**wanted, "gradient_bytes": 0, "saved_bytes": 0}
    for phase in ("infer", "sync", "left"):
        assert counted(found[phase]) == idle
        assert found[phase]["bucket_bytes"] == 0


def test_bfloat16_halves_what_is_saved_but_not_the_state(small: Path) -> None:
    found = audited(make_engine(small, dtype="bfloat16"), num_micro_batches=2)["train"]
    saved = saved_bytes(
        SMALL, "fsdp2", tokens=TOKENS, predicted=PREDICTED, recompute=False, num_bytes=2
    )
    assert counted(found) == {**state_bytes(SMALL, "fsdp2", 1), "saved_bytes": saved}
    assert found["bucket_bytes"] == 2 * (SMALL.root_weights + SMALL.layer_weights)


def test_a_gradient_that_outlives_the_step_is_seen(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleEngine, "optimizer_zero_grad", lambda self: None)
    assert audited(make_engine(small))["sync"]["gradient_bytes"] == 4 * SMALL.weights


def test_logits_that_are_kept_whole_are_seen(small: Path) -> None:
    found = audited(make_engine(small, chunked_logprobs=False))["train"]
    surplus = found["saved_bytes"] - expected("fsdp2", recompute=False)["saved_bytes"]
    assert surplus >= 4 * PREDICTED * SMALL.vocabulary


def test_a_moment_too_many_is_seen(small: Path) -> None:
    engine = make_engine(small)
    assert isinstance(engine, ModuleEngine)
    assert engine._optimizer is not None
    for state in engine._optimizer.state.values():
        state["exp_avg"] = torch.cat([state["exp_avg"]] * 2)[: len(state["exp_avg"])]
    found = MemoryAudit(lambda: [engine], engine.spec.platform).held()
    assert found.moment_bytes == 12 * SMALL.weights


def test_a_graph_that_outlives_its_micro_batch_is_seen(small: Path) -> None:
    kept: list[torch.Tensor] = []

    def leaking(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        # Its square saves the logprobs, which no backward pass of the engine releases.
        kept.append(outputs.logprobs_T.square())
        return likelihood(outputs, batch, counts)

    engine = make_engine(small)
    once, often = (audited(engine, num, 1, leaking)["train"]["saved_bytes"] for num in (1, 8))
    # The storage of logprobs has one place more than there are tokens.
    assert often - once == 7 * 4 * (TOKENS + 1)
    assert once > expected("fsdp2", recompute=False)["saved_bytes"]


def test_results_are_bitwise_those_without_the_audit(small: Path) -> None:
    losses = []
    for use_audit in (False, True):
        engine = make_engine(small, gradient_checkpointing=True)
        audit = MemoryAudit(lambda engine=engine: [engine], engine.spec.platform)
        for _ in range(2):
            if use_audit:
                with audit.phase("train"):
                    losses.append(engine.train_batch(draw_batch(2), likelihood))
            else:
                losses.append(engine.train_batch(draw_batch(2), likelihood))
    assert losses[:2] == losses[2:]


def test_the_systems_figures_are_of_the_peak(small: Path) -> None:
    engine = make_engine(small)
    audit = MemoryAudit(lambda: [engine], engine.spec.platform)
    with audit.phase("train"):
        engine.train_batch(draw_batch(1), likelihood)
    found = audit.phases["train"]
    assert 0 < found.counted_bytes <= found.largest.total_bytes < found.system_bytes
    metrics = audit.take_metrics()
    assert metrics["memory/train_saved_bytes"] == found.largest.saved_bytes
    assert metrics["memory/train_system_bytes"] == found.system_bytes
    assert "memory/train_cache_bytes" not in metrics
    assert audit.take_metrics() == {}


def test_a_sampler_counts_in_its_phase(small: Path) -> None:
    engine = make_engine(small)
    audit = MemoryAudit(lambda: [engine], engine.spec.platform, lambda: (100, 20))
    with audit.phase("sample"):
        pass
    found = audit.phases["sample"].largest
    assert (found.engine_bytes, found.cache_bytes) == (100, 20)
    assert found.parameter_bytes == 4 * SMALL.weights


def test_a_backend_that_does_not_tell_is_an_error(small: Path) -> None:
    engine = make_engine(small)
    with pytest.raises(EngineError, match=r"unset training\.memory_audit"):
        EngineBackend.held_tensors(engine)


def run_ranks(root: Path, num_ranks: int, resident: Sequence[str]) -> list[dict[str, Any]]:
    program = [str(Path(__file__).with_name("memory_ranks.py")), f"--root={root}"]
    start = start_python_anew if resident else start_python  # the allocator reads its settings once
    launch([*program, "--resident", *resident], num_ranks, root, 300, start=start)
    files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    path = tmp_path_factory.mktemp("memory")
    (path / "small").symlink_to(make_model("qwen3", **SMALL.config))
    (path / "large").symlink_to(make_model("qwen3", **LARGE.config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "resident"),
    [(1, ("fsdp2", "megatron")), (2, ("fsdp2", "fsdp")), (4, ())],
    ids=str,
)
def test_ranks_of_each_backend_hold_what_formulas_say(
    num_ranks: int, resident: Sequence[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 and 8 micro-batches, 1 and 4 steps, with recomputed layers and without."""
    for name, value in EXACT_MALLOC.items():
        monkeypatch.setenv(name, value)
    ranks = run_ranks(root, num_ranks, resident)
    for backend in resident:
        for found in (rank.pop(f"resident {backend}") for rank in ranks):
            assert found["counted"] == pytest.approx(found["resident"], rel=TOLERANCE), backend
    for name, found in ranks[0].items():
        backend, recompute, *_ = name.split()
        is_megatron = backend == "megatron"
        wanted = expected(backend, recompute=recompute == "True", num_ranks=num_ranks)
        trained = [counted(rank[name]["train"]) for rank in ranks]
        if is_megatron:
            moments = sum(each["moment_bytes"] for each in trained)
            trained = [{**each, "moment_bytes": moments} for each in trained]
        assert trained == [wanted] * num_ranks, name
        kept = wanted["gradient_bytes"] if is_megatron else 0
        for phase in ("infer", "sync", "left"):
            idle = found[phase]
            assert (idle["gradient_bytes"], idle["saved_bytes"]) == (kept, 0), (name, phase)
        assert found["left"]["bucket_bytes"] == 0, name
        if backend == "fsdp2" and num_ranks > 1:
            assert found["train"]["bucket_bytes"] == fsdp2_bucket_bytes(SMALL, num_ranks), name
