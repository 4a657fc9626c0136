"""Tiny models for the contract of rollout engines, and what a plain forward pass says of them."""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engines.checkpoint.hub_names import hub_slots
from engines.checksum import combine, tensor_checksum
from engines.rollout.transformers.sampling import filter_logits
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest
from engines.weight_sync.in_process import SafetensorsSource

PAD, EOS = 0, 3
CONTEXT_LENGTH = 512
PREFIX = tuple(4 + (7 * i) % 28 for i in range(200))
"""Longer than a block of any engine's cache, which for vLLM on a CPU holds 128 tokens."""
GROUPS: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: "embed_tokens" in name,
    "norms": lambda name: "norm" in name,
    "head": lambda name: "lm_head" in name,
    "projections": lambda name: "_proj" in name,
}
"""Parts of a model that an engine may hold in memory of different kinds."""
EXPERT_GROUPS: dict[str, Callable[[str], bool]] = {
    "experts": lambda name: ".experts." in name,
    "routers": lambda name: ".gate." in name,
}
"""Further ones of a mixture of experts."""


def config(tied: bool) -> Qwen3Config:
    """Heads of 32, the smallest that vLLM computes on a CPU."""
    return Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=48,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=PAD,
        architectures=["Qwen3ForCausalLM"],
    )


def experts_config() -> Qwen3MoeConfig:
    """The same with four experts in each layer, of which a token takes two."""
    own = {**config(tied=False).to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    del own["model_type"]
    return Qwen3MoeConfig(
        **{**own, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    )


TEXTS = ("<pad>", "<a>", "<b>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", "th", "er")
"""Text of each token; the texts of several stand next to each other without a space."""


def write_tokenizer(directory: Path) -> None:
    """Save a tokenizer of `TEXTS` beside a model."""
    words = {text: token for token, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)


def text_of(token_ids: Iterable[int]) -> str:
    """What they say, without special tokens."""
    return "".join(TEXTS[token] for token in token_ids if token not in (PAD, EOS))


def model(tied: bool, seed: int):
    """Random weights, see `model_of`."""
    return model_of(config(tied), seed)


def model_of(model_config: PretrainedConfig, seed: int):
    """Random weights; norms too, since those of 1 would hide one that is not updated."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).eval()
    for name, parameter in made.named_parameters():
        if GROUPS["norms"](name):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def changed(made, group: str, seed: int):
    """The same model with other weights in one of its `GROUPS`, or `EXPERT_GROUPS`."""
    torch.manual_seed(seed)
    belongs = (GROUPS | EXPERT_GROUPS)[group]
    for name, parameter in made.named_parameters():
        if belongs(name):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def tensors_of(made) -> dict[str, Tensor]:
    """Every parameter by its name on disk, tied ones once."""
    own = dict(made.named_parameters())
    slots = hub_slots(made).items()
    return {name: slot.view(own[slot.parameter]).clone() for name, slot in slots}


def receipt_of(tensors: dict[str, Tensor]) -> WeightDigest:
    """What a receiver of exactly these holds."""
    return WeightDigest(
        digest=combine((name, tensor_checksum(tensor)) for name, tensor in tensors.items()),
        num_tensors=len(tensors),
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )


def source_of(tensors: dict[str, Tensor], path: Path) -> SafetensorsSource:
    """The tensors in a file, which any process can read."""
    save_file(tensors, path)
    return SafetensorsSource(path)


@torch.no_grad()
def reference_logprobs(made, request: RolloutRequest, token_ids: Sequence[int]) -> Tensor:
    """Logprobs of sampled tokens under the request's distribution, by a plain forward pass."""
    sampling = request.sampling
    ids = torch.tensor([[*request.prompt_ids, *token_ids]])
    logits = made(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    if sampling.temperature:
        logits = logits / sampling.temperature
        top_k = torch.full((len(logits),), sampling.top_k)
        top_p = torch.full((len(logits),), sampling.top_p, dtype=torch.float64)
        logits = filter_logits(logits, top_k, top_p)
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]


E4M3_MAX = 448.0


class Quantized(nn.Linear):
    """A linear layer whose weights and inputs are rounded to 8-bit floats."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        return (rounded(input) @ rounded(self.weight).T).to(input.dtype)


def rounded(rows: Tensor) -> Tensor:
    """Each row divided by its scale, rounded to E4M3 and multiplied again, in float32."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale


def quantized(made):
    """A copy of a model; each layer but the head has a scale for each output and each token."""
    own = copy.deepcopy(made)
    for name, layer in own.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.__class__ = Quantized
    return own


def mean_difference(
    made, asked: Iterable[RolloutRequest], completions: Iterable[Completion]
) -> float:
    """The mean of what `largest_difference` takes the largest of."""
    by_id = {request.request_id: request for request in asked}
    rows = [
        reference_logprobs(made, by_id[c.request_id], c.token_ids.tolist())
        - torch.tensor(c.logprobs)
        for c in completions
    ]
    return float(torch.cat(rows).abs().mean())


def largest_difference(
    made, asked: Iterable[RolloutRequest], completions: Iterable[Completion]
) -> float:
    """Between the logprobs that an engine reported and those of a plain forward pass."""
    by_id = {request.request_id: request for request in asked}
    worst = 0.0
    for c in completions:
        expected = reference_logprobs(made, by_id[c.request_id], c.token_ids.tolist())
        worst = max(worst, float((expected - torch.tensor(c.logprobs)).abs().max()))
    return worst
