"""A run of a cluster: two ranks that train a tiny policy; beside them, the same on one rank.

python three_nodes_driver.py DIRECTORY [until it fails]
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.launch import connect_ray, launch_policy_group
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import Queueing
from engines.controller.worker_group import WorkerGroup
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.errors import WorkerError
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import TokenBatch

IDS = [[(7 * i + t) % 13 + 4 for t in range(5 + i % 4)] for i in range(9)]
BATCH = TokenBatch.from_sequences(IDS, loss_mask=[[0, 0, *[1] * (len(x) - 2)] for x in IDS])


def tiny_policy(root: Path) -> WorkerSpec:
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=32, chat_template=None
    )
    shape = ArchitectureConfig(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
    )
    create_random_model(shape, tokenizer, 32, 5, root / "model")
    return WorkerSpec(
        roles={
            POLICY: RoleSpec(
                ModelSource(root / "model"),
                TrainingConfig(num_workers=2),
                OptimizerConfig(lr=1e-2),
                total_num_steps=10,
            )
        },
        serving_dir=root / "model",
        rollout=None,
        temperature=1.0,
        platform="cpu",
        seed=0,
    )


def losses(group: WorkerGroup) -> list[float]:
    return [group.run(ModelWorker.train, BATCH, SupervisedLoss()).loss for _ in range(5)]


def main() -> None:
    root, endless = Path(sys.argv[1]), len(sys.argv) > 2
    torch.set_num_threads(1)
    spec, said, found = tiny_policy(root), [], dict[str, Any]()
    connect_ray()
    with closing(launch_policy_group(spec, root, Queueing(say=said.append))) as group:
        found["losses"] = losses(group)
        try:
            while endless:
                (root / "busy").touch()
                losses(group)
        except WorkerError as error:
            found["error"] = str(error)
    found["said"] = said
    found["logs"] = [(root / f"rank-{rank}.log").read_text() for rank in range(2)]
    alone = replace(spec, roles={POLICY: replace(spec.policy, training=TrainingConfig())})
    with closing(launch_policy_group(alone, root)) as group:
        found["alone"] = losses(group)
    (root / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
