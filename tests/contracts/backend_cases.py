"""What a training backend must do, as cases that run on every rank of a process group.

Run as a program it is one rank: it writes the result of every case as JSON. The reference is a
plain single-process transformers loop, one sequence at a time, without any of our code.
"""

import argparse
import json
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import EngineError, NonFiniteError
from engines.training import collectives
from engines.training.base import BaseEngine
from engines.training.registry import create_engine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

NUM_STEPS = 4
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1)
MODELS = ("qwen3", "llama")


@dataclass(frozen=True)
class Context:
    """Where a rank runs its cases."""

    backend: str
    root: Path
    rank: int
    world_size: int

    def engine(
        self, model: str = "qwen3", *, load: bool = True, frozen: bool = False, **training: Any
    ) -> BaseEngine:
        config = TrainingConfig(backend=self.backend, collective_timeout_s=30.0, **training)
        engine = create_engine(
            "language_model",
            self.root / model,
            config,
            None if frozen else OPTIMIZER,
            100,
            CPUPlatform(),
            seed=0,
        )
        engine.initialize(load_weights=load)
        return engine

    def share(self, batch: TokenBatch) -> TokenBatch:
        """Uneven on purpose: the last rank gets one sequence, the others the rest."""
        if self.world_size == 1:
            return batch
        rest, last = range(batch.num_sequences - 1), batch.num_sequences - 1
        mine = (
            [last]
            if self.rank == self.world_size - 1
            else list(rest)[self.rank :: self.world_size - 1]
        )
        return batch.select(mine)


def make_batch(step: int) -> TokenBatch:
    """Eight sequences of 2 to 23 tokens; one of them is not trained on at all."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(2, 24, (8,), generator=generator).tolist()
    ids = [torch.randint(3, 19, (n,), generator=generator).tolist() for n in lengths]
    masks = [[float(t >= max(1, n // 3)) for t in range(n)] for n in lengths]
    masks[3] = [0.0] * lengths[3]
    return TokenBatch.from_sequences(ids, loss_mask=masks)


def loss_fn(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Token mean + half the mean of sequence means - a little entropy: uses all counts."""
    assert outputs.entropy_T is not None
    mask_T = batch.columns["loss_mask"]
    nll_T = -outputs.logprobs_T * mask_T
    sums_B = nll_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index_T, nll_T)
    sizes_B = nll_T.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index_T, mask_T)
    entropy = (outputs.entropy_T * mask_T).sum() / counts.num_tokens
    loss = (
        nll_T.sum() / counts.num_tokens
        + 0.5 * (sums_B / sizes_B.clamp(min=1)).sum() / counts.num_sequences
        - 0.01 * entropy
    )
    return LossOutput(loss, {"entropy": entropy, "trained": mask_T.sum()}, {"worst": nll_T.max()})


loss_fn.needs_entropy = True


def reference(model_dir: Path) -> list[tuple[float, float]]:
    """(loss, pre-clip gradient norm) of each step, by transformers and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    results = []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        rows = [
            (ids, mask[1:])
            for ids, mask in zip(
                batch.input_ids_T.split(batch.lengths_B.tolist()),
                batch.columns["loss_mask"].split(batch.lengths_B.tolist()),
                strict=True,
            )
        ]
        num_tokens = sum(int(mask.sum()) for _, mask in rows)
        num_sequences = sum(bool(mask.any()) for _, mask in rows)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for ids, mask in rows:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none") * mask
            entropy = torch.distributions.Categorical(logits=logits).entropy() * mask
            loss = loss + nll.sum() / num_tokens - 0.01 * entropy.sum() / num_tokens
            loss = loss + 0.5 * nll.sum() / max(1.0, float(mask.sum())) / num_sequences
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def train(
    context: Context, engine: BaseEngine, steps: range = range(NUM_STEPS)
) -> list[list[float]]:
    """(loss, gradient norm, metrics...) of each step."""
    results = []
    for step in steps:
        metrics = engine.train_batch(context.share(make_batch(step)), loss_fn)
        values = [metrics.metrics[name] for name in ("entropy", "trained", "worst")]
        results.append([metrics.loss, metrics.grad_norm, *values, metrics.num_tokens])
    return results


def case_trains(context: Context) -> dict[str, Any]:
    """The same four steps under every way of splitting and computing them."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "micro_batches": {"max_tokens_per_micro_batch": 24},
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "bfloat16": {"dtype": "bfloat16"},
        "offload": {"param_offload": True, "optimizer_offload": True},
    }
    results = {name: train(context, context.engine(**options)) for name, options in ways.items()}
    return results | {"llama": train(context, context.engine("llama"))}


def case_infers(context: Context) -> dict[str, Any]:
    """Log-probabilities: packed, alone, under another budget, and as training sees them."""
    engine, batch = context.engine(), make_batch(0)
    everything = TokenBatch(batch.input_ids_T, batch.cu_seqlens)
    packed = engine.infer_batch(everything, entropy=True)
    alone = torch.cat([
        engine.infer_batch(everything.select([i])).logprobs_T for i in range(batch.num_sequences)
    ])  # fmt: skip
    small = context.engine(max_tokens_per_micro_batch=24).infer_batch(everything).logprobs_T
    frozen = context.engine(frozen=True).infer_batch(everything).logprobs_T
    seen: list[Tensor] = []

    def spy(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append(outputs.logprobs_T.detach().clone())
        return loss_fn(outputs, batch, counts)

    spy.needs_entropy = True
    one = context.share(batch).select([0])
    inferred = engine.infer_batch(one).logprobs_T
    engine.train_batch(one, spy)
    assert packed.entropy_T is not None
    return {
        "packed": packed.logprobs_T.tolist(),
        "entropy": packed.entropy_T.tolist(),
        "alone": alone.tolist(),
        "small": small.tolist(),
        "frozen": frozen.tolist(),
        "train_minus_infer": float((seen[-1] - inferred).abs().max()),
        "masked_are_zero": bool((inferred[one.columns["loss_mask"] == 0] == 0).all()),
    }


def case_checkpoints(context: Context) -> dict[str, Any]:
    """Save after two steps, continue; resume at this size; resume what the other size saved."""
    own, results = context.root / f"checkpoint-{context.world_size}", {}
    if context.rank == 0:
        own.mkdir()
    engine = context.engine()
    train(context, engine, range(2))
    engine.save_checkpoint(own, step=2)
    results["continued"] = train(context, engine, range(2, NUM_STEPS))
    final = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    if context.rank == 0:
        save_file(final, context.root / f"final-{context.world_size}.safetensors")
    for saved in sorted(context.root.glob("checkpoint-*")):
        resumed = context.engine(load=False)
        assert resumed.load_checkpoint(saved) == 2
        results[saved.name] = train(context, resumed, range(2, NUM_STEPS))
        same = [torch.equal(t, final[name]) for name, t in resumed.get_per_tensor_param()]
        results[f"{saved.name}-bitwise"] = all(same)
    results["after_inference"] = {}
    for dtype in ("float32", "bfloat16"):
        used = context.engine(dtype=dtype)
        before = {name: tensor.clone() for name, tensor in used.get_per_tensor_param()}
        used.infer_batch(make_batch(0))
        after = dict(used.get_per_tensor_param())
        same = [t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in after.items()]
        used.load_checkpoint(own)
        results["after_inference"][dtype] = [all(same), train(context, used, range(2, NUM_STEPS))]
    fresh = context.engine()
    fresh.load_checkpoint(own, optimizer=False)
    results["weights_only"] = train(context, fresh, range(2, NUM_STEPS))
    return results


def case_guards(context: Context) -> dict[str, Any]:
    """A number that is not finite on one rank stops all ranks and changes nothing."""
    engine, results = context.engine(), {}
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    bad_rank = context.world_size - 1

    def spoiled(value: float, where: str) -> Callable[..., LossOutput]:
        def spoil(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
            output = loss_fn(outputs, batch, counts)
            if context.rank != bad_rank:
                return output
            if where == "loss":
                return LossOutput(output.loss * value, output.metrics, output.maxima)
            outputs.logprobs_T.register_hook(lambda grad: grad * value)
            return output

        spoil.needs_entropy = True
        return spoil

    for where in ("loss", "gradient"):
        for value in (math.nan, math.inf, -math.inf):
            try:
                engine.train_batch(context.share(make_batch(0)), spoiled(value, where))
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
    results["after"] = train(context, engine)
    return results


CASES = (case_trains, case_infers, case_checkpoints, case_guards)


def run_cases(context: Context) -> dict[str, Any]:
    """Results of all cases; a case that raises leaves its traceback under its name."""
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            results[case.__name__] = case(context)
        except Exception:  # noqa: BLE001 (the boundary of a test process)
            results[case.__name__] = {"error": traceback.format_exc()}
            break
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--root", "--rank", "--world-size", "--port"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(args.rank), int(args.world_size)
    dist.init_process_group(
        CPUPlatform().communication_backend,
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    results = run_cases(Context(args.backend, Path(args.root), rank, world_size))
    path = Path(args.root) / f"results-{world_size}-{rank}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
