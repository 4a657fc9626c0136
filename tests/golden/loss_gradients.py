"""One rank of a layout: the gradient of every policy loss, cut into 1 and into 7 micro-batches.

An optimizer whose update is the gradient times a constant (AdamW without memory and with a huge
epsilon) makes the difference of streamed weights the gradient, whatever the backend and layout.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rlhf.testing.launch import join_group, rank_arguments
from safetensors.torch import save_file
from torch import Tensor

from engines import collectives
from engines.algorithms.policy_objective import PolicyObjective, policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows import POLICY_LOSSES
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine, create_engine
from engines.training.spec import LossFn
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform

EPS = 1e6
SCALE = 1e3
"""Of the differences above the gradients: the weights' own last digits do not count then."""
OPTIMIZER = OptimizerConfig(
    lr=EPS * SCALE, betas=(0.0, 0.0), eps=EPS, weight_decay=0.0, max_grad_norm=1e9
)
NUM_SEQUENCES, LENGTH, NUM_PROMPT = 28, 8, 3
NUM_MICRO_BATCHES = (1, 7)
OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}


def objective(name: str) -> PolicyObjective:
    """The loss with every term beside it: entropy, KL and positive examples."""
    algorithm = AlgorithmConfig(
        loss_mode=name,
        loss_agg_mode=POLICY_LOSSES.find(name).loss_agg_mode or "token-mean",  # pyright: ignore[reportArgumentType]
        clip_ratio=0.1,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.05,
        positive_nll_coef=0.1,
        options=OPTIONS.get(name, {}),
    )
    return policy_loss_fn(algorithm, LENGTH)


def samples() -> TokenBatch:
    """Sequences of one length, of which so much is trained on as differs between them."""
    generator = torch.Generator().manual_seed(5)
    shape = (NUM_SEQUENCES, LENGTH)
    ids = torch.randint(3, 30, shape, generator=generator)
    ends = torch.randint(NUM_PROMPT + 1, LENGTH + 1, (NUM_SEQUENCES, 1), generator=generator)
    place = torch.arange(LENGTH)
    mask = ((place >= NUM_PROMPT) & (place < ends)).float()
    advantages = torch.randn(NUM_SEQUENCES, 1, generator=generator).expand(shape)
    positive = (torch.arange(NUM_SEQUENCES)[:, None] % 3 == 0).float().expand(shape) * mask
    batch = TokenBatch.from_sequences(ids.tolist(), loss_mask=mask.tolist())
    return batch.with_columns(
        advantages=advantages.flatten(),
        positive=positive.flatten(),
        uniform=torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64),
    )


def with_old_logprobs(batch: TokenBatch, logprobs_T: Tensor) -> TokenBatch:
    """Policies before the update and of the reference: near the policy, inside and outside."""
    generator = torch.Generator().manual_seed(6)
    mask_T = batch.columns["loss_mask"]
    noise = [0.2 * torch.randn(batch.num_tokens, generator=generator) for _ in range(2)]
    old_T, ref_T = (((logprobs_T + each) * mask_T).clamp(max=-1e-3) for each in noise)
    return batch.with_columns(old_logprobs=old_T * mask_T, ref_logprobs=ref_T * mask_T)


class Counted:
    """A loss function that counts its micro-batches; what it reads beside them is its own."""

    def __init__(self, loss: LossFn) -> None:
        self.loss, self.num_calls = loss, 0
        for name in ("extras", "readouts"):
            if hasattr(loss, name):
                setattr(self, name, getattr(loss, name))

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        self.num_calls += 1
        return self.loss(outputs, batch, counts)


def gradients(
    engine: BaseEngine, name: str, share: TokenBatch, num_micro: int
) -> dict[str, Tensor]:
    """By weight; the engine's weights are spoilt."""
    before = {key: tensor.clone() for key, tensor in engine.get_per_tensor_param()}
    loss = Counted(objective(name))
    engine.train_batch(share, loss)
    assert loss.num_calls in (num_micro, 0)  # only a pipeline's last stage sees outputs
    return {
        key: (before[key].double() - tensor.double()) / SCALE
        for key, tensor in engine.get_per_tensor_param()
    }


def relative_errors(
    found: Mapping[str, Tensor], plain: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, float]:
    """How far the gradients of the ranks are from plain ones.

    Args:
        found: by `loss/number of micro-batches/weight`, of all weights.
        plain: by loss and weight; no gradient may be nearly 0.

    Returns:
        By loss and number of micro-batches, the norm of the difference over that of the plain one.
    """
    errors = {}
    for name, wanted in plain.items():
        size = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
        assert size > 1e-3, name
        for num_micro in NUM_MICRO_BATCHES:
            prefix = f"{name}/{num_micro}/"
            ours = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
            assert ours.keys() == wanted.keys()
            gaps = torch.stack([(ours[key] - wanted[key]).norm() for key in wanted])
            errors[prefix] = float(gaps.norm() / size)
    return errors


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    for name in ("models", "batch", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--training", type=json.loads, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    join_group(args)
    batch = with_old_logprobs(samples(), torch.load(args.batch, weights_only=True))
    found: dict[str, Tensor] = {}
    for num_micro in NUM_MICRO_BATCHES:
        size = args.world_size // max(1, _ranks_of_a_replica(args.training))
        tokens = NUM_SEQUENCES * LENGTH // size // num_micro
        sharing = args.training.get("ulysses_size", 1)
        config = TrainingConfig(
            backend=args.backend,
            num_workers=args.world_size,
            collective_timeout_s=60.0,
            max_tokens_per_micro_batch=tokens // sharing,
            **args.training,
        )
        model = args.models / "qwen3"
        engine = create_engine("language_model", model, config, OPTIMIZER, 10, CPUPlatform(), 0)
        engine.initialize()
        assert engine.data_parallel_size == size
        start = args.out.parent / f"start-{num_micro}"
        start.mkdir(exist_ok=True)
        engine.save_checkpoint(start, 0)
        for name in POLICY_LOSSES.names():
            engine.load_checkpoint(start)
            share = batch.select(range(engine.data_parallel_rank, NUM_SEQUENCES, size))
            for key, tensor in gradients(engine, name, share, num_micro).items():
                found[f"{name}/{num_micro}/{key}"] = tensor.contiguous()
    if args.rank == 0:
        save_file(found, args.out)
    collectives.close_process_group()


def _ranks_of_a_replica(training: Mapping[str, int]) -> int:
    product = 1
    for size in training.values():
        product *= size
    return product


if __name__ == "__main__":
    main()
