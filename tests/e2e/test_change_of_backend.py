"""A Megatron-Core checkpoint of 2 x 2 ranks becomes a Hugging Face model that fsdp2 continues."""

import json
from pathlib import Path

import pytest
import torch
from rlhf.testing.context import loss_fn, share
from rlhf.testing.launch import join_group, launch, rank_arguments
from rlhf.testing.plain_loop import make_batch
from rlhf.testing.tiny_models import write_tiny_models
from safetensors.torch import load_file

from engines import collectives
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.jobs.process.policy import policy_source
from engines.jobs.rl_round import critic_source
from engines.training.backends.merging import merge_checkpoint
from engines.training.base import BaseEngine, create_engine
from hardware.cpu import CPUPlatform

WORLD_SIZE, NUM_STEPS = 4, 3
DEADLINE_S = 400.0
TRAINING = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_workers": WORLD_SIZE}


def engine_of(model: Path, backend: str, lr: float, **training: object) -> BaseEngine:
    config = TrainingConfig.model_validate({"backend": backend, **training})
    optimizer = OptimizerConfig(lr=lr)
    engine = create_engine("language_model", model, config, optimizer, 10, CPUPlatform(), seed=0)
    engine.initialize()
    return engine


def main() -> None:
    """Be a rank: train, save, and tell the loss of the next step."""
    parser = rank_arguments()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    engine = engine_of(args.model, "megatron", 1e-2, **TRAINING)
    for step in range(NUM_STEPS):
        engine.train_batch(share(engine, make_batch(step)), loss_fn)
    if args.rank == 0:
        (args.out / "checkpoint").mkdir()
    collectives.barrier()
    engine.save_checkpoint(args.out / "checkpoint", NUM_STEPS)
    update = engine.train_batch(share(engine, make_batch(NUM_STEPS)), loss_fn)
    if args.rank == 0:
        (args.out / "next.json").write_text(json.dumps([update.loss, update.grad_norm]))
    collectives.close_process_group()


@pytest.mark.slow
def test_fsdp2_continues_what_megatron_began(tmp_path: Path) -> None:
    write_tiny_models(tmp_path)
    policy = tmp_path / "policy"
    (policy / "hf").mkdir(parents=True)
    model = tmp_path / "qwen3"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (policy / "hf" / name).write_bytes((model / name).read_bytes())
    launch([__file__, f"--model={model}", f"--out={policy}"], WORLD_SIZE, tmp_path, DEADLINE_S)
    merge_checkpoint(policy, tmp_path / "merged", "float32", 1 << 30)
    loss, norm = json.loads((policy / "next.json").read_text())
    update = engine_of(tmp_path / "merged", "fsdp2", 1e-2).train_batch(
        make_batch(NUM_STEPS), loss_fn
    )
    assert update.loss == pytest.approx(loss, abs=1e-5)
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)
    check_critic(policy, tmp_path)


def check_critic(policy: Path, tmp_path: Path) -> None:
    """A critic starts on those weights, and with a head of 0."""
    source = critic_source(policy_source(policy), policy, tmp_path)
    training = TrainingConfig(num_threads=1)
    critic = create_engine("value_model", source.hf_dir, training, None, 1, CPUPlatform(), seed=0)
    critic.initialize()
    found = {name: tensor.clone() for name, tensor in critic.get_per_tensor_param()}
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert not found.pop("score.weight").any()
    found.pop("score.bias", None)
    assert merged.keys() - found.keys() <= {"lm_head.weight"}
    assert all(torch.equal(tensor, merged[name]) for name, tensor in found.items())


if __name__ == "__main__":
    main()
