"""What an engine said of a trained model, held against its trainer and a plain forward pass.

Promises: the trainer's numbers are those of the engine that trained, of packed sequences; the plain
ones are of transformers and torch alone, one sequence at a time. Each check returns nothing and
raises `Lacking`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from family_checks import LOGPROB, Family, builds, logprobs_of, trained, trains
from plain_reference import Lacking, largest, plain_logits, plain_logprobs
from safetensors.torch import save_file
from served_probe import WEIGHTS, Answers
from tiny_config import tiny_config, with_wide_heads
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

WRONG_BY = 10 * LOGPROB
"""What the step has to change at least: else weights that were not updated could not be seen."""


@dataclass(frozen=True)
class TrainedFamily:
    """A tiny model after one step, and what it was before.

    Attributes:
        family: with the engine that trained it.
        before: the model before the step, by transformers alone.
        after: the model after it, likewise.
    """

    family: Family
    before: nn.Module
    after: nn.Module


def train_family(name: str, root: Path) -> TrainedFamily:
    """Build and train a tiny model of a family, and write what `served_probe` needs.

    Args:
        name: its model type.
        root: an empty directory.

    Returns:
        The family.

    Raises:
        Lacking: it does not train, as its row of the other page says.
    """
    family = Family(name, root, with_wide_heads(tiny_config(name)))
    builds(family)
    trains(family)
    weights = {
        name: tensor.detach().clone() for name, tensor in trained(family).get_per_tensor_param()
    }
    save_file(weights, root / WEIGHTS)
    before, after = (
        AutoModelForCausalLM.from_pretrained(family.hf_dir, dtype=torch.float32).eval()
        for _ in range(2)
    )
    after.load_state_dict(trained(family).model.state_dict())
    return TrainedFamily(family, before, after)


def samples(model: TrainedFamily, answers: Answers) -> None:
    """Greedy tokens are the likeliest; of equals either."""
    for sample in answers.samples:
        if not sample.token_ids:
            raise Lacking("a sample came without a token")
        if not sample.greedy:
            continue
        logits = plain_logits(model.after, [*sample.prompt_ids, *sample.token_ids])
        logits = logits[len(sample.prompt_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        gap = float((logits.amax(1) - chosen).max())
        if not gap < LOGPROB:
            raise Lacking(f"a greedy token is less likely than another, by {gap:.1e}")


def agrees(model: TrainedFamily, answers: Answers) -> None:
    """Logprobs of what was sampled are the trainer's, and not those before the step."""
    whole = [[*each.prompt_ids, *each.token_ids] for each in answers.samples]
    said = [torch.tensor(each.logprobs) for each in answers.samples]

    def of_samples(logprobs: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(logprobs, answers.samples, strict=True)
        return [found[len(sample.prompt_ids) :] for found, sample in pairs]

    difference = largest(of_samples(logprobs_of(trained(model.family), whole)), said)
    if not difference < LOGPROB:
        raise Lacking(f"sampled logprobs differ by {difference:.1e} from the trainer's")
    moved = largest(of_samples([plain_logprobs(model.before, ids) for ids in whole]), said)
    if moved < WRONG_BY:
        raise Lacking(f"the step changed what the engine says by {moved:.1e}, too little to see")


def prompts(model: TrainedFamily, answers: Answers) -> None:
    """Logprobs of given tokens, and the likeliest of each place, are those of a plain pass."""
    for prompt in answers.prompts:
        ids = list(prompt.token_ids)
        plain = plain_logits(model.after, ids)[:-1].log_softmax(-1)
        tops = torch.tensor(prompt.top_ids)
        said = torch.tensor(prompt.top_logprobs)
        own = plain.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        wanted = [own, plain.gather(1, tops), plain.topk(tops.shape[1], dim=1).values]
        found = [torch.tensor(prompt.logprobs), said, said]
        worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        if not worst < LOGPROB:
            raise Lacking(f"logprobs of given tokens differ by {worst:.1e} from a plain pass")
