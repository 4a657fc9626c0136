"""One rank of workers with several roles; run as a program, writes as JSON what each role holds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.testing.backend_cases import tensor_bytes
from rlhf.testing.launch import join_group, rank_arguments
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines import collectives
from engines.algorithms.policy_objective import ValueObjective, policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.training import LoraConfig, OptimizerConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.training.spec import CRITIC, POLICY, REFERENCE, ModelSource, RoleName, RoleSpec
from engines.types import Readouts, TokenBatch

WORLD_SIZE, LORA_RANK = 2, 4


def main() -> None:
    """Be one rank."""
    parser = rank_arguments()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    join_group(args)
    whole = TrainingConfig(num_threads=1, num_workers=WORLD_SIZE)
    adapter = whole.model_copy(update={"lora": LoraConfig(rank=LORA_RANK)})
    found = {
        name: held(worker_spec(args.model, training))
        for name, training in (("whole", whole), ("lora", adapter))
    }
    path = args.root / f"results-{args.rank}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    collectives.close_process_group()


def worker_spec(model: Path, training: TrainingConfig) -> WorkerSpec:
    source, optimizer = ModelSource(model), OptimizerConfig()
    critic = training.model_copy(update={"lora": None})
    roles: dict[RoleName, RoleSpec] = {
        POLICY: RoleSpec(source, training, optimizer, total_num_steps=10),
        REFERENCE: RoleSpec(source, training),
        CRITIC: RoleSpec(source, critic, optimizer, "value_model", total_num_steps=10),
    }
    return WorkerSpec(roles, model, None, 1.0, "cpu", seed=0)


def held(spec: WorkerSpec) -> dict[str, Any]:
    """Bytes of this rank before and after a step: by role, and of all that the worker made."""
    before = tensor_bytes()
    worker = ModelWorker(spec)
    worker.initialize()
    made = {"at_start": by_role(worker), "all_at_start": tensor_bytes() - before}
    take_step(worker)
    return made | {"after_a_step": by_role(worker), "all_after_a_step": tensor_bytes() - before}


def by_role(worker: ModelWorker) -> dict[str, dict[str, int]]:
    """Parameters and optimizer state."""
    found = {}
    for name, engine in worker._engines.items():
        assert isinstance(engine, TransformersModelEngine)
        states = engine._optimizer.state.values() if engine._optimizer is not None else ()
        found[name] = {
            "parameters": num_bytes(engine.model.parameters()),
            "optimizer": num_bytes(t for state in states for t in state.values() if t.dim()),
        }
    return found


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of this rank's parts."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def take_step(worker: ModelWorker) -> None:
    """Everything that a PPO step asks of a worker."""
    mask = [[0.0] + [1.0] * 9] * 3
    batch = TokenBatch.from_sequences(
        [list(range(4, 14))] * 3, loss_mask=mask, advantages=mask, returns=mask, values=mask
    )
    old, reference = worker.infer_logprobs(batch), worker.infer_logprobs(batch, REFERENCE)
    worker.infer(batch, Readouts(last_values=True), CRITIC)
    batch = batch.with_columns(old_logprobs=old, ref_logprobs=reference)
    worker.train(batch, ValueObjective(0.5), CRITIC)
    worker.train(batch, policy_loss_fn(AlgorithmConfig(use_kl_loss=True), 9))


if __name__ == "__main__":
    main()
