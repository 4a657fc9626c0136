"""What the audit counts against formulas, and against the resident memory of the process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rlhf.testing.memory_formulas import bucket_bytes, saved_bytes, state_bytes
from rlhf.testing.memory_ranks import (
    EXACT_MALLOC,
    PREDICTED,
    SIZES,
    SMALL,
    TOKENS,
    audited,
    check_ranks,
    counted,
    draw_batch,
    expected,
    likelihood,
    make_engine,
    run_ranks,
    write_models,
)

from engines.collectives import close_process_group
from engines.errors import EngineError
from engines.training.backends.transformers.module_engine import ModuleEngine
from engines.training.engine_backend import EngineBackend
from engines.training.memory_audit import MemoryAudit
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

BACKENDS = ("fsdp2", "fsdp", "megatron")
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def small(make_model: MakeModel) -> Path:
    return make_model("qwen3", **SMALL.config)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    close_process_group()


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
    assert found["bucket_bytes"] == bucket_bytes(SMALL, "fsdp2", 1, num_bytes=2)


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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    write_models(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    # In one process fsdp is the same as fsdp2.
    ("num_ranks", "resident"),
    [(1, ("fsdp2", "megatron")), (2, ("fsdp2", "fsdp")), (4, ("fsdp2",))],
    ids=str,
)
def test_ranks_of_each_backend_hold_what_formulas_say(
    num_ranks: int, resident: Sequence[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backends with environments of their own have the same in `rlhf.testing.test_memory`."""
    for name, value in EXACT_MALLOC.items():
        monkeypatch.setenv(name, value)
    check_ranks(run_ranks(root, num_ranks, BACKENDS, resident))
