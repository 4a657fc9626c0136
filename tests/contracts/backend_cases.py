"""What a training backend must do under one layout, as cases that run on every rank.

Each case returns plain data for the tests to judge; nothing is judged here. `plain_loop.py` holds
the reference.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from rlhf.testing.average_cases import case_average
from rlhf.testing.context import WITH_ENTROPY, Context, loss_fn, share, train, value_loss_fn
from rlhf.testing.layouts import ACCUMULATED, PRIMARY
from rlhf.testing.plain_loop import NUM_STEPS, make_batch, without_mask
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engines import collectives
from engines.config.training import LoraConfig
from engines.errors import EngineError, NonFiniteError
from engines.training.base import BaseEngine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch

LORA = LoraConfig(rank=4, alpha=8.0)
COMPILED = {"use_torch_compile": True, "torch_compile_backend": "aot_eager"}
"""Without a C++ compiler, and much sooner than inductor."""
Results = dict[str, Any]


def case_trains(context: Context) -> Results:
    """The same four steps under every way of splitting and computing them."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "micro_batches": {"max_tokens_per_micro_batch": 24},
    }
    if context.layout.name in PRIMARY:
        ways |= {
            "gradient_checkpointing": {"gradient_checkpointing": True},
            "activation_offload": {"activation_offload": True},
            "offload": {"param_offload": True, "optimizer_offload": True},
            "whole_logits": {"chunked_logprobs": False},
            "bfloat16": {"dtype": "bfloat16"},
            "bfloat16_micro_batches": {"dtype": "bfloat16", "max_tokens_per_micro_batch": 24},
        }
        if "compile" in context.claims:
            ways["compiled"] = COMPILED
            ways["compiled_and_recomputed"] = {**COMPILED, "gradient_checkpointing": True}
    results = {name: train(context.engine(**options)) for name, options in ways.items()}
    others = ["llama"] if context.layout.model == "qwen3" else []
    if context.layout.name in PRIMARY and "moe" in context.claims:
        others.append("qwen3_moe")
    return results | {model: train(context.engine(model)) for model in others}


def case_accumulates(context: Context) -> Results:
    """Equal micro-batches in one step: the gradient of one of them, and what is held in between."""
    if context.layout.name not in ACCUMULATED:
        return {}
    ids, mask = list(range(3, 19)), [0.0] + [1.0] * 15
    batch = TokenBatch.from_sequences([ids] * 16, loss_mask=[mask] * 16)
    results: Results = {}
    for name, rows in (("one", batch.select([0])), ("many", batch)):
        engine = context.engine(dtype="bfloat16", max_tokens_per_micro_batch=16)
        update = engine.train_batch(rows, loss_fn)
        results[name] = [update.loss, update.grad_norm]
    engine = context.engine(max_tokens_per_micro_batch=16)
    engine.train_batch(batch.select([0]), loss_fn)  # what is made at the first use is there
    return results | held_between(engine, batch.select(range(3)))


def held_between(engine: BaseEngine, batch: TokenBatch) -> Results:
    """Bytes that a step holds at each of its micro-batches, above those at the first."""
    held: list[int] = []

    def measure(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        held.append(settled_bytes())
        return loss_fn(outputs, batch, counts)

    measure.readouts = WITH_ENTROPY
    engine.train_batch(batch, measure)
    num_own = sum(shard.values.numel() for shard in engine.get_per_tensor_param_shard())
    return {"held_bytes": [size - held[0] for size in held], "num_own_values": num_own}


def settled_bytes() -> int:
    """What stays: threads of a collective keep its tensors for a moment after its end."""
    found, num_looks = tensor_bytes(), 0
    while num_looks < 10:  # in a row that find no less
        time.sleep(0.05)
        now = tensor_bytes()
        found, num_looks = (now, 0) if now < found else (found, num_looks + 1)
    return found


def tensor_bytes() -> int:
    """Memory of all tensors of this process; those that only stand for shapes have none."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, Parameter, DTensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]
    storages = {(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in local}
    return sum(storages.values())


def case_infers(context: Context) -> Results:
    """Log-probabilities: packed, alone, under another budget, and as training sees them."""
    engine, batch = context.engine(), make_batch(0)
    everything = without_mask(batch)
    packed = engine.infer_batch(everything, Readouts(entropy=True, sum_pi_squared=True))
    alone = torch.cat([
        engine.infer_batch(everything.select([i])).logprobs_T for i in range(batch.num_sequences)
    ])  # fmt: skip
    small = context.engine(max_tokens_per_micro_batch=24).infer_batch(everything).logprobs_T
    frozen = context.engine(frozen=True).infer_batch(everything).logprobs_T
    seen: list[Tensor] = []

    def spy(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append(outputs.logprobs_T.detach().clone())
        return loss_fn(outputs, batch, counts)

    spy.readouts = WITH_ENTROPY
    one = share(engine, batch).select([0])
    inferred = engine.infer_batch(one).logprobs_T
    engine.train_batch(one, spy)
    assert packed.entropy_T is not None
    assert packed.sum_pi_squared_T is not None
    return {
        "packed": packed.logprobs_T.tolist(),
        "entropy": packed.entropy_T.tolist(),
        "sum_pi_squared": packed.sum_pi_squared_T.tolist(),
        "alone": alone.tolist(),
        "small": small.tolist(),
        "frozen": frozen.tolist(),
        # Earlier stages of a pipeline see no outputs.
        "train_minus_infer": float((seen[-1] - inferred).abs().max()) if seen else None,
        "masked_are_zero": bool((inferred[one.columns["loss_mask"] == 0] == 0).all()),
    }


def shards_of(engine: BaseEngine) -> Results:
    """This rank's parts of the weights with their places, against the whole weights."""
    whole = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    owned, places = dict.fromkeys(whole, 0), []
    equal = True
    for shard in engine.get_per_tensor_param_shard():
        if shard.is_owner:
            places.append(astuple(shard.place))
        expected = whole[shard.place.name]
        equal &= shard.place.whole == tuple(expected.shape)
        equal &= torch.equal(shard.values, expected[shard.place.slices])
        owned[shard.place.name] += shard.values.numel() * shard.is_owner
    sizes = {name: tensor.numel() for name, tensor in whole.items()}
    return {"equal": equal, "owned": owned, "sizes": sizes, "places": places}


def file_contents(directory: Path) -> dict[str, bytes]:
    """By name, of all files."""
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def case_checkpoints(context: Context) -> Results:
    """Save after two steps, continue; resume here; resume what one rank saved."""
    root, results = context.root, {}
    own, behind = (root / f"{name}-{context.layout.name}" for name in ("checkpoint", "behind"))
    if context.rank == 0:
        own.mkdir()
        behind.mkdir()
    engine = context.engine()
    train(engine, range(2))
    engine.save_checkpoint(own, step=2)
    write = engine.begin_checkpoint(behind, step=2)
    results["continued"] = train(engine, range(2, NUM_STEPS))
    write()
    collectives.barrier()
    results["behind_is_equal"] = file_contents(behind) == file_contents(own)
    final = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    if context.rank == 0:
        save_file(final, root / f"final-{context.layout.name}.safetensors")
    results["shards"] = shards_of(engine)
    others = [
        name
        for name, world_size in (("alone", 1), ("data2", 2))
        if context.layout.model == "qwen3" and context.layout.world_size > world_size
    ]
    for name in (context.layout.name, *others):
        resumed = context.engine(load=False)
        assert resumed.load_checkpoint(root / f"checkpoint-{name}") == 2
        results[f"from-{name}"] = train(resumed, range(2, NUM_STEPS))
        same = [torch.equal(t, final[n]) for n, t in resumed.get_per_tensor_param()]
        results[f"from-{name}-bitwise"] = all(same)
    fresh = context.engine()
    fresh.load_checkpoint(own, optimizer=False)
    results["weights_only"] = train(fresh, range(2, NUM_STEPS))
    return results


def case_inference_leaves_no_trace(context: Context) -> Results:
    """Weights before and after inference, and a resume after it."""
    if context.layout.name not in PRIMARY:
        return {}
    results: Results = {}
    for dtype in ("float32", "bfloat16"):
        used = context.engine(dtype=dtype)
        before = {name: tensor.clone() for name, tensor in used.get_per_tensor_param()}
        used.infer_batch(make_batch(0))
        after = dict(used.get_per_tensor_param())
        same = [t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in after.items()]
        used.load_checkpoint(context.root / f"checkpoint-{context.layout.name}")
        results[dtype] = [all(same), train(used, range(2, NUM_STEPS))]
    return results


def case_guards(context: Context) -> Results:
    """A number that is not finite on one rank stops all ranks and changes nothing."""
    engine, results = context.engine(), {}
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    bad = engine.data_parallel_rank == engine.data_parallel_size - 1

    def spoiled(value: float, where: str) -> Callable[..., LossOutput]:
        def spoil(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
            output = loss_fn(outputs, batch, counts)
            if not bad:
                return output
            if where == "loss":
                return LossOutput(output.loss * value, output.metrics, output.maxima)
            outputs.logprobs_T.register_hook(lambda grad: grad * value)
            return output

        spoil.readouts = WITH_ENTROPY
        return spoil

    for where in ("loss", "gradient"):
        for value in (math.nan, math.inf, -math.inf):
            try:
                engine.train_batch(share(engine, make_batch(0)), spoiled(value, where))
                results[f"{where}={value}"] = "no error"
            except NonFiniteError as error:
                results[f"{where}={value}"] = type(error).__name__
    results["unchanged"] = all(
        torch.equal(tensor, before[name]) for name, tensor in engine.get_per_tensor_param()
    )
    nothing = TokenBatch.from_sequences([[3, 4]], loss_mask=[[0.0, 0.0]])
    try:
        engine.train_batch(nothing, loss_fn)
    except EngineError as error:
        results["empty_mask"] = str(error)
    results["after"] = train(engine)
    return results


def case_values(context: Context) -> Results:
    """A value model, all of it trained and, where the backend has them, only an adapter."""
    if "value_model" not in context.claims:
        return {}
    results = values_trained(context, "values")
    if "lora" in context.claims:
        results["adapted"] = values_trained(context, "adapted-values", lora=LORA)
    if context.layout.name in PRIMARY:
        others: dict[str, tuple[str, dict[str, Any]]] = {
            "moe": ("qwen3_moe", {}),
            "compile": (context.layout.model, COMPILED),
        }
        for claim, (model, training) in others.items():
            if claim in context.claims:
                engine = context.engine(model, values=True, **training)
                results[claim] = train_values(engine, range(NUM_STEPS))
    return results


def values_trained(context: Context, name: str, **training: Any) -> Results:
    """Four steps, what it infers before and after, and a resume; leaves the final weights."""
    engine = context.engine(values=True, **training)
    results: Results = {"before": engine.infer_batch(make_batch(0)).values_T.tolist()}
    path = context.root / f"{name}-{context.layout.name}"
    if context.rank == 0:
        path.mkdir()
    results["steps"] = train_values(engine, range(2))
    engine.save_checkpoint(path, step=2)
    results["continued"] = train_values(engine, range(2, NUM_STEPS))
    batch = make_batch(0)
    everything = without_mask(batch)
    after = engine.infer_batch(everything, Readouts(last_values=True))
    assert after.last_values_B is not None
    results["after"] = after.values_T.tolist()
    results["last"] = after.last_values_B.tolist()
    # Only what is behind the sequences, where nothing else is wanted.
    nothing = everything.with_columns(loss_mask=torch.zeros(everything.num_tokens))
    alone = engine.infer_batch(nothing, Readouts(last_values=True))
    assert alone.last_values_B is not None
    results["last_alone"] = alone.last_values_B.tolist()
    results["masked"] = float(alone.values_T.abs().max())
    resumed = context.engine(values=True, load=False, **training)
    resumed.load_checkpoint(path)
    results["resumed"] = train_values(resumed, range(2, NUM_STEPS))
    final = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    if context.rank == 0:
        save_file(final, path / "final.safetensors")
    return results


def train_values(engine: BaseEngine, steps: range) -> list[list[float]]:
    """(loss, gradient norm) of each step."""
    updates = [engine.train_batch(share(engine, make_batch(i)), value_loss_fn) for i in steps]
    return [[update.loss, update.grad_norm] for update in updates]


def case_adapter(context: Context) -> Results:
    """A low-rank adapter: off it is the reference, trained it is what is streamed."""
    if "lora" not in context.claims:
        return {}
    engine = context.engine(lora=LORA)
    batch = make_batch(0)
    everything = without_mask(batch)
    plain = context.engine(frozen=True).infer_batch(everything).logprobs_T
    results: Results = {
        "start_minus_plain": float((engine.infer_batch(everything).logprobs_T - plain).abs().max())
    }
    path = context.root / f"adapter-{context.layout.name}"
    if context.rank == 0:
        path.mkdir()
    results["steps"] = train(engine, range(2))
    engine.save_checkpoint(path, step=2)
    results["continued"] = train(engine, range(2, NUM_STEPS))
    results["after"] = engine.infer_batch(everything).logprobs_T.tolist()
    with engine.disable_adapter():
        off = engine.infer_batch(everything).logprobs_T
    results["off_minus_plain"] = float((off - plain).abs().max())
    results["on_again"] = engine.infer_batch(everything).logprobs_T.tolist()
    final = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    if context.rank == 0:
        save_file(final, path / "final.safetensors")
    if "adapter stream" in context.claims:
        results["streamed"] = streamed_apart(engine, final)
    results["shards"] = shards_of(engine)
    resumed = context.engine(lora=LORA, load=False)
    resumed.load_checkpoint(path)
    results["resumed"] = train(resumed, range(2, NUM_STEPS))
    merged = context.engine(load=False)
    merged.load_checkpoint(path, optimizer=False)
    resumed = context.engine(lora=LORA, load=False)
    resumed.load_checkpoint(path)
    results["merged_minus_adapted"] = float(
        (merged.infer_batch(everything).logprobs_T - resumed.infer_batch(everything).logprobs_T)
        .abs()
        .max()
    )
    return results


def streamed_apart(engine: BaseEngine, final: dict[str, Tensor]) -> dict[str, Any]:
    """How W + alpha / rank * B @ A, of what is streamed apart, differs from what is streamed."""
    frozen = {name: tensor.clone() for name, tensor in engine.get_frozen_param()}
    pairs = {name: tensor.clone() for name, tensor in engine.get_adapter_param()}
    worst = 0.0
    for name, whole in final.items():
        module = name.removesuffix(".weight")
        total = frozen[name].float()
        if f"{module}.lora_A.weight" in pairs:
            b, a = pairs.pop(f"{module}.lora_B.weight"), pairs.pop(f"{module}.lora_A.weight")
            total = total + LORA.alpha / LORA.rank * (b @ a)
        worst = max(worst, float((total - whole).abs().max()))
    return {"difference": worst, "names": [*frozen] == [*final], "left_over": sorted(pairs)}


def case_shards(context: Context) -> Results:
    """Parts of weights that are fused in memory; the other cases look at the rest."""
    if context.layout.name != "data2" or "moe" not in context.claims:
        return {}
    return shards_of(context.engine("qwen3_moe"))


CASES = (
    case_trains,
    case_accumulates,
    case_infers,
    case_checkpoints,
    case_average,
    case_inference_leaves_no_trace,
    case_guards,
    case_values,
    case_adapter,
    case_shards,
)


def run_cases(context: Context) -> Results:
    """Results of all cases; a case that raises leaves its traceback under its name.

    Later cases of that layout are not run: ranks that stopped at different places would wait
    for one another.
    """
    results: Results = {}
    for case in CASES:
        try:
            results[case.__name__] = case(context)
        except Exception:  # noqa: BLE001 (the boundary of a test process)
            results[case.__name__] = {"error": traceback.format_exc()}
            break
    return results
