"""What a family of models can do here, tried on a tiny one: one function per column of the table.

Each check returns nothing and raises: `Lacking` says what is wrong, an error of the engines says it
in its own words. Promises: the same random numbers for a family whatever ran before it; the
reference is transformers and torch alone, one sequence at a time, with the attention that
transformers chooses. Everything is float32 on one CPU rank.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_reference import (
    Lacking,
    Sequences,
    answer_mask,
    largest,
    plain_logits,
    plain_logprobs,
    plain_loss,
    relative_error,
)
from rlhf.testing.rollout_calls import generate_all, send_weights
from tiny_config import CONTEXT, VOCABULARY, tiny_config
from tiny_family import SEED, random_sequences, spread_weights, write_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engines.algorithms.supervised import SupervisedLoss
from engines.checkpoint.model_directory import check_model_directory
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.rollout.base import create_rollout_engine
from engines.training.backends.merging import merge_checkpoint
from engines.training.backends.transformers.module_engine import ModuleEngine
from engines.training.base import create_engine
from engines.types import RolloutRequest, SamplingParams, TokenBatch
from hardware.cpu import CPUPlatform

GRADIENT, LOGPROB = 1e-4, 1e-4
"""Relative norm of the difference of gradients; largest difference of log-probabilities."""
LENGTHS = (23, 12, 3, 12, 2, 17)
MAX_NEW_TOKENS = 16


@dataclass
class Family:
    """One family under trial.

    Attributes:
        model_type: of transformers.
        root: an empty directory of its own.
        config: its configuration; None: the tiny one.
        plain: the model by transformers alone; made by `builds`.
        engine: that trains; made by `trains`.
        sampled: prompts, tokens and logprobs of each sample; made by `samples`.
    """

    model_type: str
    root: Path
    config: PretrainedConfig | None = None
    plain: nn.Module | None = None
    engine: ModuleEngine[nn.Module] | None = None
    sampled: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = ()

    @property
    def hf_dir(self) -> Path:
        """The tiny model on disk."""
        return self.root / "hf"


def builds(family: Family) -> None:
    """Write a tiny model that transformers loads again and that is a causal LM."""
    torch.manual_seed(SEED)
    config = family.config or tiny_config(family.model_type)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.save_pretrained(family.hf_dir)
    write_tokenizer(family.hf_dir)
    saved = AutoConfig.from_pretrained(family.hf_dir)
    if saved.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise Lacking(
            f"it is saved as {saved.model_type}, which transformers loads as no causal LM"
        )
    plain = AutoModelForCausalLM.from_pretrained(family.hf_dir, dtype=torch.float32).eval()
    (ids,) = random_sequences((LENGTHS[0],))
    others = [*ids[:-1], 3 if ids[-1] != 3 else 4]
    logits, changed = (plain_logits(plain, sequence) for sequence in (ids, others))
    if logits.shape != (len(ids), VOCABULARY) or not bool(logits.isfinite().all()):
        raise Lacking(f"its logits have the shape {tuple(logits.shape)}, or are not finite")
    # Not by the bit: the tokens of an expert are computed together.
    if largest([logits[:-1]], [changed[:-1]]) > LOGPROB:
        raise Lacking("it is no causal language model: logits depend on later tokens")
    family.plain = plain


def trains(family: Family) -> None:
    """One SFT step: plain gradients, and log-probabilities of packed sequences as alone."""
    check_model_directory(family.hf_dir, max_length=CONTEXT)
    sequences, plain = random_sequences(LENGTHS), family.plain
    assert plain is not None
    batch = TokenBatch.from_sequences(sequences, loss_mask=[answer_mask(len(x)) for x in sequences])
    engine = create_engine(
        "language_model", family.hf_dir, TrainingConfig(backend="fsdp2"),
        OptimizerConfig(lr=1e-3), 10, CPUPlatform(), seed=SEED,
    )  # fmt: skip
    assert isinstance(engine, ModuleEngine)
    engine.initialize()
    family.engine = engine
    check_packing(engine, plain, sequences)
    loss = plain_loss(plain, sequences)
    loss.backward()
    found = kept_gradients(engine.model)
    ours = engine.train_batch(batch, SupervisedLoss()).loss
    if abs(ours - loss.item()) > LOGPROB:
        raise Lacking(f"its loss is {ours:.6f}, that of plain autograd {loss.item():.6f}")
    error = relative_error(found, {name: p.grad for name, p in plain.named_parameters()})
    if not error < GRADIENT:
        raise Lacking(f"its gradient differs from plain autograd's by {error:.1e} of the norm")


def check_packing(engine: ModuleEngine[nn.Module], plain: nn.Module, sequences: Sequences) -> None:
    """Log-probabilities of packed sequences are those of each alone, and those of a plain model.

    Args:
        engine: with the weights of the plain model.
        plain: the reference.
        sequences: the first is longer than any window.

    Raises:
        Lacking: they differ, or would not differ if sequences saw each other.
    """
    alone = [logprobs_of(engine, [sequence])[0] for sequence in sequences]
    packed = logprobs_of(engine, sequences)
    expected = [plain_logprobs(plain, sequence) for sequence in sequences]
    first, second = sequences[:2]
    joined = plain_logprobs(plain, [*first, *second])[len(first) :]
    if largest([joined], expected[1:2]) < 10 * LOGPROB:
        raise Lacking("what it predicts hardly depends on earlier tokens: a leak could not be seen")
    leak = largest(packed, alone)
    if not leak < LOGPROB:
        raise Lacking(f"packed sequences see each other: logprobs differ by {leak:.1e} from alone")
    difference = largest(packed, expected)
    if not difference < LOGPROB:
        raise Lacking(f"logprobs differ by {difference:.1e} from a plain forward pass")


def samples(family: Family) -> None:
    """The embedded rollout engine takes the trained weights and samples."""
    engine = trained(family)
    rollout = create_rollout_engine(
        "transformers", family.hf_dir, RolloutConfig(), "float32", CPUPlatform()
    )
    send_weights(rollout, engine.get_per_tensor_param(), version=0)
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    prompts = [tuple(ids) for ids in random_sequences((9, 3, 14))]
    requests = [
        RolloutRequest(f"prompt={i}", prompt, sampling, seeds=(2 * i, 2 * i + 1))
        for i, prompt in enumerate(prompts)
    ]
    completions = generate_all(rollout, requests, timeout_s=600.0)
    by_id = {request.request_id: request.prompt_ids for request in requests}
    family.sampled = [
        (by_id[c.request_id], c.token_ids.tolist(), c.logprobs.tolist()) for c in completions
    ]
    num_tokens = sum(len(tokens) for _, tokens, _ in family.sampled)
    if num_tokens < len(completions) * 2:
        raise Lacking(f"only {num_tokens} tokens came of {len(completions)} samples")


def agrees(family: Family) -> None:
    """The sampled log-probabilities are the trainer's."""
    whole = [[*prompt, *tokens] for prompt, tokens, _ in family.sampled]
    found = logprobs_of(trained(family), whole)
    ours = [
        logprobs[len(prompt) :]
        for logprobs, (prompt, _, _) in zip(found, family.sampled, strict=True)
    ]
    difference = largest(ours, [torch.tensor(logprobs) for _, _, logprobs in family.sampled])
    if not difference < LOGPROB:
        raise Lacking(f"sampled logprobs differ by {difference:.1e} from the trainer's")


def exports(family: Family) -> None:
    """A checkpoint, merged, is a directory that transformers loads, with equal logits."""
    engine = trained(family)
    policy, merged = family.root / "policy", family.root / "merged"
    (policy / "checkpoint").mkdir(parents=True)
    shutil.copytree(family.hf_dir, policy / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    engine.save_checkpoint(policy / "checkpoint", step=1)
    merge_checkpoint(policy, merged, "float32", max_shard_bytes=2**30)
    held = AutoModelForCausalLM.from_pretrained(family.hf_dir, dtype=torch.float32).eval()
    before = plain_logits(held, random_sequences(LENGTHS)[0])
    held.load_state_dict(engine.model.state_dict())
    reloaded: Any = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True
    )
    loaded, info = reloaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [kind for kind in kinds if info[kind]]
    if wrong:
        raise Lacking(f"the exported directory has {', '.join(wrong)}: {sorted(info[wrong[0]])[0]}")
    for sequence in random_sequences(LENGTHS):
        ours, theirs = (plain_logits(model.eval(), sequence) for model in (held, loaded))
        if not torch.equal(ours, theirs):
            raise Lacking(f"reloaded logits differ by {float((ours - theirs).abs().max()):.1e}")
    if torch.equal(before, plain_logits(held, random_sequences(LENGTHS)[0])):
        raise Lacking("the step changed no logits")


def trained(family: Family) -> ModuleEngine[nn.Module]:
    """The engine that `trains` left."""
    assert family.engine is not None
    return family.engine


def logprobs_of(engine: ModuleEngine[nn.Module], sequences: Sequences) -> list[Tensor]:
    """By an engine, of packed sequences: of each (length,) float32, 0 at the first token."""
    batch = TokenBatch.from_sequences(sequences)
    return list(engine.infer_batch(batch).logprobs_T.split([len(ids) for ids in sequences]))


def kept_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, filled by the next backward pass; a later one replaces them."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: found.__setitem__(name, p.grad.clone())
        )
    return found
