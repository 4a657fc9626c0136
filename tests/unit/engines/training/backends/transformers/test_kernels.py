"""Where fused kernels are put, judged with plain functions in their place."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM as Causal
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from engines.training.backends.transformers.build import FusedKernels, liger_kernels, use_kernels
from infra.errors import ConfigError

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MIXTURE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Counted:
    """The kernels' formulas, counting their calls."""

    def __init__(self) -> None:
        self.num_norms = self.num_gates = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.num_norms += 1
        return weight * (x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        self.num_gates += 1
        return silu(gate) * up

    def kernels(self) -> FusedKernels:
        return FusedKernels(self.rms_norm, self.silu_mul)


def loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("config", "num_norms", "num_gates"),
    [
        (LlamaConfig(**SIZES), 2 * 2 + 1, 2),
        (Qwen3Config(**SIZES), 2 * 4 + 1, 2),  # also norms of queries and keys
        # The experts of a mixture are one fused module, which keeps its own kernel.
        (Qwen3MoeConfig(**SIZES, **MIXTURE), 2 * 4 + 1, 0),
    ],
    ids=["llama", "qwen3", "qwen3_moe"],
)
def test_kernels_take_the_place_of_norms_and_gates(config, num_norms: int, num_gates: int) -> None:
    torch.manual_seed(0)
    model, twin = Causal.from_config(config), Causal.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    twin.load_state_dict(model.state_dict())
    counted = Counted()
    assert use_kernels(twin, counted.kernels()) == num_norms + num_gates
    (ours, our_grads), (theirs, their_grads) = loss_and_gradients(twin), loss_and_gradients(model)
    assert (counted.num_norms, counted.num_gates) == (num_norms, num_gates)
    torch.testing.assert_close(ours, theirs)
    assert our_grads.keys() == their_grads.keys()
    for name, grad in our_grads.items():
        torch.testing.assert_close(grad, their_grads[name], rtol=1e-4, atol=1e-6)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_norm_of_another_formula_is_refused() -> None:
    with torch.device("meta"):
        model = Causal.from_config(Gemma2Config(**SIZES))
    with pytest.raises(
        ConfigError, match=r"training.use_liger: got true for a model of type gemma2"
    ):
        use_kernels(model, Counted().kernels())


def test_kernels_of_a_gpu_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"training.use_liger: got true; .* need a GPU; set it"):
        liger_kernels(torch.device("cpu"))
