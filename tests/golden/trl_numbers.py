"""What TRL's own code computes on fixed inputs; imports nothing of ours.

Runs in the environment of `tests/benchmarks/requirements-trl.txt`, which says how to make it:

    .venv-trl/bin/python tests/golden/trl_numbers.py

Writes `trl_numbers.json`: versions, inputs as plain lists, and results. Trainers are TRL's, made
from a tiny model; what a forward pass or a sampler would give them is put in its place.
`trl_inputs.py` has the cases; `test_trl_numbers.py` and `test_trl_advantages.py` compare.
"""

import json
import random
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import entropy_from_logits, selective_log_softmax
from trl_inputs import ADVANTAGES, KL, LOSSES, PROMPTS, make_step, make_steps
from trl_trainers import MODEL, make_sft_trainer, make_trainer, padded, ragged, write_model

GOLDEN = Path(__file__).with_name("trl_numbers.json")
PAD = -3.0
"""A log-probability where an answer is over; nothing may depend on it."""


def loss_numbers(directory, steps, kind, name, settings, parts=1):
    """Loss, and its gradient by log-probability and entropy, of TRL's `_compute_loss`."""
    step = steps[name]
    num_answers = len(step["mask"])
    trainer = make_trainer(directory, kind, settings, num_answers, 2, parts=parts)
    logprobs = padded(step["logprobs"], PAD).requires_grad_()
    entropy = padded(step["entropy"], PAD).requires_grad_()
    inputs = loss_inputs(step, kind)
    loss = torch.zeros((), dtype=torch.float64)
    for own in torch.arange(num_answers).chunk(parts):
        found = (logprobs[own], entropy[own], None)
        trainer._get_per_token_logps_and_entropies = lambda *_, found=found, **__: found
        batch = {key: x if x.dim() == 0 else x[own] for key, x in inputs.items()}
        loss = loss + trainer.compute_loss(trainer.model, batch)
    loss.backward()
    region = trainer._metrics["train"]["clip_ratio/region_mean"]
    result = {"loss": loss.item(), "gradient": ragged(logprobs.grad, step["mask"])}
    if entropy.grad is not None:
        result["entropy_gradient"] = ragged(entropy.grad, step["mask"])
    return result | ({"clipped": region[0]} if len(region) == 1 else {})


def loss_inputs(step, kind):
    mask = padded(step["mask"], 0, torch.long)
    inside = padded([[1] * len(row) for row in step["mask"]], 0, torch.long)
    old = padded(step["old_logprobs"], PAD + 0.5)
    inputs = {
        "prompt_ids": torch.full((len(mask), 1), 2),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": inside * 3,
        "advantages": torch.tensor(step["advantages"], dtype=torch.float64),
    }
    if kind == "rloo":  # it knows no holes, so they are as the padding is
        return inputs | {"completion_mask": mask, "old_logps": (old * mask).sum(1)}
    return inputs | {
        "completion_mask": inside,
        "tool_mask": padded(step["mask"], 1, torch.long),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(step["ref_logprobs"], PAD - 0.5),
        "num_items_in_batch": mask.sum(),
    }


def advantage_numbers(directory, step, kind, rewards, settings):
    """Advantages of `_generate_and_score_completions`, with answers and rewards given."""
    flat = [[x for group in groups for x in group] for groups in rewards]
    group_size = len(rewards[0][0])
    functions = [lambda given=given, **_: given for given in flat]
    trainer = make_trainer(directory, kind, settings, len(flat[0]), group_size, functions)
    answers = [[3] * len(row) for row in step["mask"]]
    sampled = answers if kind == "rloo" else (answers, None)
    trainer._generate_single_turn = lambda *_, **__: sampled
    policy, reference = padded(step["old_logprobs"], PAD), padded(step["ref_logprobs"], PAD - 0.5)

    def logprobs(model, *_, **__):
        return (policy if model is trainer.model else reference), None, None

    trainer._get_per_token_logps_and_entropies = logprobs
    found = trainer._generate_and_score_completions([{"prompt": "w2"}] * len(answers))
    return {"advantages": found["advantages"].tolist()}


def kl_numbers(directory, distances):
    """TRL's KL of one token, log-ratio to the reference given, and its slope."""
    trainer = make_trainer(directory, "grpo", {**KL, "beta": 1.0, "loss_type": "bnpo"}, 2, 2)
    values, slopes = [], []
    for distance in distances:
        step = make_step(0, [0.0], lengths=[1], masks=[[1]]) | {
            "advantages": [0.0], "logprobs": [[-1.0]], "ref_logprobs": [[-1.0 - distance]],
        }  # fmt: skip
        logprobs = padded(step["logprobs"], PAD).requires_grad_()
        found = (logprobs, torch.ones_like(logprobs), None)
        trainer._get_per_token_logps_and_entropies = lambda *_, found=found, **__: found
        loss = trainer.compute_loss(trainer.model, loss_inputs(step, "grpo"))
        loss.backward()
        values.append(loss.item())
        slopes.append(logprobs.grad.item())
    return {"distances": distances, "values": values, "slopes": slopes}


def logprob_numbers(temperature):
    """Log-probability and entropy of tokens from logits, and a weighted sum's gradient."""
    source = random.Random(6)
    given = [[round(source.gauss(0, 3), 3) for _ in range(11)] for _ in range(5)]
    logits = torch.tensor(given, requires_grad=True)
    token_ids = [3, 0, 10, 7, 7]
    logprobs = selective_log_softmax(logits, torch.tensor(token_ids), temperature)
    entropy = entropy_from_logits(logits / temperature)
    (logprobs.sum() + 0.5 * entropy.sum()).backward()
    return {
        "temperature": temperature, "logits": given, "token_ids": token_ids,
        "logprobs": logprobs.tolist(), "entropy": entropy.tolist(),
        "gradient": logits.grad.tolist(),
    }  # fmt: skip


def supervised_numbers(directory, step):
    """SFT in two micro-batches, of the log-probabilities of a forward pass that is given."""
    trainer = make_sft_trainer(directory)
    logprobs, mask = padded(step["logprobs"], PAD).requires_grad_(), padded(step["mask"], 0)
    losses = []
    for own in torch.arange(len(mask)).chunk(2):
        scored = SimpleNamespace(
            log_probs=logprobs[own] * mask[own], label_mask=mask[own] > 0,
            entropy=torch.zeros(1), is_top1=torch.zeros(1),
        )  # fmt: skip
        inputs = {"labels": None, "attention_mask": mask[own]}
        losses.append(trainer.compute_loss(lambda *_, s=scored, **__: s, inputs, False, mask.sum()))
    sum(losses).backward()
    return {"loss": sum(losses).item(), "gradient": ragged(logprobs.grad, step["mask"])}


def model_numbers(directory):
    """A whole forward and backward pass, with padding, temperature and an entropy bonus."""
    prompts, answers = [x for x, _ in PROMPTS], [x for _, x in PROMPTS]
    settings = {"loss_type": "dapo", "temperature": 0.7, "entropy_coef": 0.1}
    trainer = make_trainer(directory, "grpo", settings, len(PROMPTS), 2)
    advantages = [1.5, -0.5, 0.75, -1.25]
    inputs = {
        "prompt_ids": padded([x[::-1] for x in prompts], 0, torch.long).flip(1),
        "prompt_mask": padded([[1] * len(x) for x in prompts], 0, torch.long).flip(1),
        "completion_ids": padded(answers, 0, torch.long),
        "completion_mask": padded([[1] * len(x) for x in answers], 0, torch.long),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    ids, mask = (
        torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask")
    )
    logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
    )
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    weights = dict(trainer.model.named_parameters())
    return {
        "config": MODEL, "prompts": prompts, "answers": answers, "advantages": advantages,
        "settings": settings, "loss": loss.item(), "logprobs": ragged(logprobs, answers),
        "entropy": ragged(entropy, answers),
        "gradient_norms": {name: x.grad.norm().item() for name, x in sorted(weights.items())},
    }  # fmt: skip


def overlong_numbers(limit, buffer):
    lengths = [1, limit - buffer, limit - buffer + 1, limit - 1, limit]
    penalty = get_soft_overlong_punishment(limit, buffer)
    found = penalty(completion_ids=[[3] * n for n in lengths])
    return {"limit": limit, "buffer": buffer, "lengths": lengths, "penalties": found}


def written(numbers):
    """JSON with a line for each entry of an entry."""
    parts = []
    for key, value in numbers.items():
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        own = [
            (f"  {json.dumps(name)}: " if isinstance(value, dict) else "  ") + json.dumps(row)
            for name, row in rows
        ]
        ends = "{}" if isinstance(value, dict) else "[]"
        parts.append(f"{json.dumps(key)}: {ends[0]}\n" + ",\n".join(own) + f"\n{ends[1]}")
    return "{\n" + ",\n".join(parts) + "\n}"


def main():
    steps = make_steps()
    answers = make_step(7, [0.0], lengths=[1, 3, 2, 5, 4, 1, 2, 3, 6, 2, 1, 4, 3, 3, 1, 5])
    answers["mask"] = [[1] * len(row) for row in answers["mask"]]
    with tempfile.TemporaryDirectory() as name:
        write_model(name)
        losses = {
            case: {"inputs": row[1], "settings": row[2], **loss_numbers(name, steps, *row)}
            for case, row in LOSSES.items()
        }
        advantages = {
            case: {"rewards": row[1], "settings": row[2], **advantage_numbers(name, answers, *row)}
            for case, row in ADVANTAGES.items()
        }
        supervised = supervised_numbers(name, steps["apart"])
        model = model_numbers(name)
        divergence = kl_numbers(name, [-3.5, -2.6104, -1.0, -0.01, 0.0, 0.01, 1.0, 4.0])
    numbers = {
        "versions": {package: version(package) for package in ("trl", "torch", "transformers")},
        "steps": steps, "losses": losses, "answers": answers, "advantages": advantages,
        "supervised": supervised, "model": model, "divergence": divergence,
        "logprobs": [logprob_numbers(temperature) for temperature in (1.0, 0.7)],
        "overlong": [overlong_numbers(20, 4), overlong_numbers(100, 30)],
    }  # fmt: skip
    GOLDEN.write_text(written(numbers) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
