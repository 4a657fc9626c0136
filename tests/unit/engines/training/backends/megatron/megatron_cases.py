"""One rank of the Megatron engine's own tests: what the backend contract does not ask.

Run as a program; writes the results of every case as JSON. References are transformers and
torch alone, or another backend of the project.
"""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf.testing.context import OPTIMIZER, loss_fn, train
from rlhf.testing.launch import join_group, rank_arguments
from rlhf.testing.plain_loop import NUM_STEPS, language_loss, make_batch, plain_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines import collectives
from engines.config.training import LoraConfig, TrainingConfig
from engines.training.backends.merging import extract_adapter
from engines.training.base import BaseEngine, create_engine
from engines.training.model.linear_logprobs import linear_token_logprobs
from engines.types import ONLY_LOGPROBS, TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_parallel_size": 2}
EXPERT = {"expert_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
LORA = LoraConfig(rank=4, alpha=8.0)
Results = dict[str, Any]


class Rank:
    """Makes engines for the cases."""

    def __init__(self, root: Path, rank: int) -> None:
        self.root, self.rank = root, rank

    def engine(
        self, model: str = "qwen3", *, backend: str = "megatron", load: bool = True,
        frozen: bool = False, **training: Any,
    ) -> BaseEngine:  # fmt: skip
        config = TrainingConfig(
            backend=backend, num_workers=2, collective_timeout_s=60.0, **training
        )
        engine = create_engine(
            "language_model", self.root / model, config, None if frozen else OPTIMIZER, 100,
            CPUPlatform(), seed=0,
        )  # fmt: skip
        engine.initialize(load_weights=load)
        return engine

    def fresh_dir(self, name: str) -> Path:
        path = self.root / name
        if self.rank == 0:
            path.mkdir(parents=True)
        dist.barrier()
        return path


def weights(engine: BaseEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def case_architectures(rank: Rank) -> Results:
    """Models that the contract does not have, each under a layout."""
    return {
        "qwen2": train(rank.engine("qwen2", **TENSOR)),
        "llama3": train(rank.engine("llama3", **PIPELINE)),
        "softmax_first": train(rank.engine("softmax_first", **TENSOR)),
        "tied_virtual": train(rank.engine("qwen3", **VIRTUAL, max_tokens_per_micro_batch=24)),
    }


def case_vocabulary_over_ranks(rank: Rank) -> Results:
    """Log-probabilities, entropies and gradients against whole logits, and an uneven cut."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(37, 8, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 37, (23,), generator=generator)
    grads = torch.randn(2, 23, generator=generator, dtype=torch.float64)
    first, last = (0, 19) if rank.rank == 0 else (19, 37)
    own_hidden = hidden.clone().requires_grad_()
    own_weight = weight[first:last].clone().requires_grad_()
    out = linear_token_logprobs(
        own_hidden, own_weight, tokens, temperature=0.7, entropy=True, chunk_elements=40,
        group=dist.group.WORLD, first_token=first,
    )  # fmt: skip
    torch.autograd.backward((out.logprobs_N, out.entropy_N), tuple(grads))
    summed = own_hidden.grad.clone()
    dist.all_reduce(summed)
    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=whole_hidden @ whole_weight.T / 0.7)
    expected = (distribution.log_prob(tokens), distribution.entropy())
    torch.autograd.backward(expected, tuple(grads))
    none = linear_token_logprobs(
        own_hidden[:0], own_weight, tokens[:0], entropy=True, group=dist.group.WORLD
    )
    pairs = {
        "logprobs": (out[0], expected[0]),
        "entropy": (out[1], expected[1]),
        "hidden": (summed, whole_hidden.grad),
        "weight": (own_weight.grad, whole_weight.grad[first:last]),
    }
    errors = {name: float((ours - theirs).abs().max()) for name, (ours, theirs) in pairs.items()}
    return errors | {"no_rows": none[0].numel()}


def case_adapter_as_in_fsdp2(rank: Rank) -> Results:
    """The same adapter, trained by both backends from the same first values."""
    results: Results = {}
    reference = rank.engine(backend="fsdp2", lora=LORA)
    results["fsdp2"] = train(reference)
    expected = weights(reference)
    layouts = {
        "tensor": TENSOR,
        "whole": {**TENSOR, "sequence_parallel": False},
        "pipeline": {**PIPELINE, "gradient_checkpointing": True},
        "context": CONTEXT,
    }
    for name, layout in layouts.items():
        engine = rank.engine(lora=LORA, **layout)
        results[name] = train(engine)
        found = weights(engine)
        results[f"{name}_weights"] = max(
            float((found[n] - expected[n]).abs().max()) for n in expected
        )
    some = LoraConfig(rank=2, alpha=2.0, target_modules=("v_proj", "down_proj"))
    results["some_fsdp2"] = train(rank.engine(backend="fsdp2", lora=some))
    results["some"] = train(rank.engine(lora=some, **TENSOR))
    saved = rank.fresh_dir("adapter/checkpoint")
    rank.engine(lora=LORA, **TENSOR).save_checkpoint(saved, step=0)
    theirs = rank.fresh_dir("adapter-fsdp2/checkpoint")
    rank.engine(backend="fsdp2", lora=LORA).save_checkpoint(theirs, step=0)
    for checkpoint in (saved, theirs) if rank.rank == 0 else ():
        extract_adapter(checkpoint.parent, checkpoint.parent, "float32")
    dist.barrier()
    ours, same = (load_file(p.parent / "adapter_model.safetensors") for p in (saved, theirs))
    results["saved_alike"] = ours.keys() == same.keys() and all(
        torch.equal(ours[name], same[name]) for name in ours
    )
    return results


def case_checkpoints_between_backends(rank: Rank) -> Results:
    """Save after two steps here, continue there: weights, moments and schedule."""
    results: Results = {}
    kinds = (("qwen3", TENSOR), ("qwen3", VIRTUAL), ("softmax_first", EXPERT))
    for model, layout in kinds:
        name = f"{model}-{'-'.join(layout)}"
        path = rank.fresh_dir(f"between-{name}")
        engine = rank.engine(model, **layout)
        train(engine, range(2))
        engine.save_checkpoint(path, step=2)
        there = rank.engine(model, backend="fsdp2", load=False)
        there.load_checkpoint(path)
        back = rank.fresh_dir(f"back-{name}")
        there.save_checkpoint(back, step=2)
        again = rank.engine(model, load=False, **layout)
        again.load_checkpoint(back)
        results[name] = {
            "here": train(engine, range(2, NUM_STEPS)),
            "there": train(there, range(2, NUM_STEPS)),
            "back": train(again, range(2, NUM_STEPS)),
        }
    return results


def case_frozen(rank: Rank) -> Results:
    """Parameters that are not trained, and patterns that cannot be served."""
    patterns = ("model.embed_tokens.*", "*.mlp.*", "*.1.self_attn.?_proj.weight")
    engine = rank.engine("llama", frozen_parameters=patterns, gradient_checkpointing=True, **TENSOR)
    before = weights(engine)
    steps = train(engine)
    changed = [name for name, t in weights(engine).items() if not torch.equal(t, before[name])]
    problems: dict[str, str] = {}
    for pattern in ("*.q_proj.weight", "nothing"):
        try:
            rank.engine(frozen_parameters=(pattern,), **TENSOR)
        except ConfigError as error:
            problems[pattern] = str(error)
    model = AutoModelForCausalLM.from_pretrained(rank.root / "llama", dtype=torch.float32)
    for name in set(before) - set(changed):
        model.get_parameter(name).requires_grad_(False)
    return {
        "steps": steps,
        "expected": plain_steps(model, language_loss),
        "changed": changed,
        "problems": problems,
    }


def case_two_layouts(rank: Rank) -> Results:
    """A policy and a reference under different layouts, taking turns."""
    policy, reference = rank.engine(**TENSOR), rank.engine(frozen=True, **PIPELINE)
    alone = train(rank.engine(**TENSOR))
    before = reference.infer_batch(make_batch(0)).logprobs_T
    steps = []
    for step in range(NUM_STEPS):
        steps += train(policy, range(step, step + 1))
        unchanged = torch.equal(reference.infer_batch(make_batch(0)).logprobs_T, before)
    return {"alone": alone, "in_turns": steps, "unchanged": unchanged}


def case_router_replay(rank: Rank) -> Results:
    """The same losses when nothing changed, however rows are packed; the same experts when
    routers were turned upside down in between."""
    layouts = {"data": {}, "tensor": TENSOR, "virtual": VIRTUAL, "context": CONTEXT,
               "expert": EXPERT}  # fmt: skip
    replayed: dict[str, Any] = {"options": {"router_replay": True}, "gradient_checkpointing": True}
    results: Results = {}
    for name, layout in layouts.items():
        small = {**layout, "max_tokens_per_micro_batch": 24}
        engine = rank.engine("softmax_first", **small, **replayed)
        batch = make_batch(0)
        batch = batch.select(
            range(engine.data_parallel_rank, batch.num_sequences, engine.data_parallel_size)
        )
        everything = TokenBatch(batch.input_ids_T, batch.cu_seqlens)
        backwards = list(reversed(range(batch.num_sequences)))
        for some in (backwards[::2], backwards[1::2]):
            engine.infer_batch(everything.select(some))
        plain = rank.engine("softmax_first", **small)
        losses = [e.train_batch(batch, loss_fn).loss for e in (engine, plain)]

        engine = rank.engine("softmax_first", **layout, **replayed)
        results[name] = {"losses": losses, **turned_around(engine, batch)}
    return results


def turned_around(engine: Any, batch: TokenBatch) -> Results:
    """Experts in inference, then in training with routers of the opposite sign, then without
    any memory."""
    everything = TokenBatch(batch.input_ids_T, batch.cu_seqlens)
    inferred = routed(engine, lambda: engine.infer_batch(everything))
    with torch.no_grad():
        for part in engine.replica.parts:
            if part.name.endswith("router.weight"):
                part.parameter.neg_()
    trained = routed(engine, lambda: backward(engine, batch))
    engine.replica._memory = None
    for chunk in engine.replica.chunks:
        for layer in chunk.decoder.layers:
            layer.mlp.router.router_replay = None
    free = routed(engine, lambda: backward(engine, batch))
    return {"inferred": inferred, "trained": trained, "free": free}


def backward(engine: Any, batch: TokenBatch) -> None:
    engine.optimizer_zero_grad()
    batches = [micro.batch for micro in engine._prepare(batch).micro_batches]
    engine._forward_backward(batches, lambda outputs, _: outputs.logprobs_T.sum(), ONLY_LOGPROBS)


def routed(engine: Any, call: Callable[[], object]) -> list[list[list[int]]]:
    """Experts of each token but the last, which may be padding, of each call of a router."""
    maps: list[list[list[int]]] = []
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, output: maps.append(output[1][:-1].int().tolist())
        )
        for chunk in engine.replica.chunks
        for name, module in chunk.named_modules()
        if name.endswith("mlp.router")
    ]
    call()
    for hook in hooks:
        hook.remove()
    return maps


def case_no_trace(rank: Rank) -> Results:
    """Making an engine that only infers leaves the random generator alone."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    rank.engine(frozen=True, **TENSOR).infer_batch(make_batch(0))
    return {"generator": torch.equal(before, torch.get_rng_state())}


def case_padding(rank: Rank) -> Results:
    """One token per sequence and rows shorter than the ranks: padding changes nothing."""
    batch = make_batch(0).select([1])
    expected = rank.engine(frozen=True).infer_batch(batch).logprobs_T
    results: Results = {}
    for name, layout in {"tensor": TENSOR, "context": CONTEXT}.items():
        found = rank.engine(frozen=True, **layout).infer_batch(batch).logprobs_T
        results[name] = float((found - expected).abs().max())
    return results


CASES: tuple[Callable[[Rank], Results], ...] = (
    case_architectures,
    case_vocabulary_over_ranks,
    case_adapter_as_in_fsdp2,
    case_checkpoints_between_backends,
    case_frozen,
    case_two_layouts,
    case_router_replay,
    case_no_trace,
    case_padding,
)


def main() -> None:
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    rank = Rank(args.root, args.rank)
    results: Results = {}
    for case in CASES:
        try:
            results[case.__name__] = case(rank)
        except Exception:  # noqa: BLE001 (the boundary of a test process)
            results[case.__name__] = {"error": traceback.format_exc()}
            break
    (rank.root / f"results-{rank.rank}.json").write_text(json.dumps(results), encoding="utf-8")
    collectives.close_process_group()


if __name__ == "__main__":
    main()
