"""The transformers rollout engine on one device: parity with a plain forward pass, weight sync.

The weights come from a live training engine, as in a colocated run. The reference is a plain
transformers model that holds the same weights and sees each whole sample at once.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.algorithms.supervised import SupervisedLoss
from engines.checksum import ChecksumMethod
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import RolloutEngine, create_rollout_engine
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.base import BaseEngine, create_engine
from engines.types import Completion, Readouts, RolloutRequest, SamplingParams, TokenBatch
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.base import PlatformBase

DTYPES = ("float32", "bfloat16")
ROLLOUT = RolloutConfig(max_num_sequences=8, timeout_s=120.0)
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-1}
MEAN_DIFFERENCE = {"float32": 2e-5, "bfloat16": 2e-2}


def new_trainer(model_dir: Path, platform: PlatformBase, dtype: str) -> BaseEngine:
    training = TrainingConfig.model_validate({"dtype": dtype, "collective_timeout_s": 60.0})
    engine = create_engine(
        "language_model", model_dir, training, OptimizerConfig(lr=1e-2), 10, platform, seed=0
    )  # fmt: skip
    engine.initialize()
    return engine


def requests(num_samples: int = 3, temperature: float = 1.0) -> list[RolloutRequest]:
    """Five prompts of 1 to 120 tokens; more samples than the engine runs together."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, 512, (n,), generator=generator) for n in (1, 5, 33, 64, 120)]
    return [
        RolloutRequest(
            f"prompt={i}",
            tuple(prompt.tolist()),
            SamplingParams(max_new_tokens=24 + i, temperature=temperature),
            tuple(range(100 * i, 100 * i + num_samples)),
        )
        for i, prompt in enumerate(prompts)
    ]


def teacher(model_dir: Path, trainer: BaseEngine, dtype: str, device: torch.device):
    """A plain model with the trainer's weights, rounded to the rollout's dtype."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in trainer.get_per_tensor_param():
            parameters.pop(name).copy_(tensor)
    assert not parameters
    return model


@torch.no_grad()
def differences(
    model: torch.nn.Module, asked: Sequence[RolloutRequest], completions: Sequence[Completion],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """|rollout - teacher-forced| logprob of every sampled token."""
    prompts = {request.request_id: request.prompt_ids for request in asked}
    parts = []
    for done in completions:
        prompt = prompts[done.request_id]
        ids = torch.tensor([[*prompt, *done.token_ids.tolist()]], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        parts.append((logprobs.squeeze(1).cpu() - torch.tensor(done.logprobs)).abs())
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_those_of_the_trained_weights(
    platform: PlatformBase, model_dir: Path, dtype: str
) -> None:
    trainer = new_trainer(model_dir, platform, dtype)
    engine = create_rollout_engine("transformers", model_dir, ROLLOUT, dtype, platform)
    digests, asked = [], requests()
    for version in (0, 1):
        report = send_weights(engine, trainer.get_per_tensor_param(), version, dtype)
        digests.append(report.digest)
        completions = generate_all(engine, asked, timeout_s=120.0)
        model = teacher(model_dir, trainer, dtype, platform.device())
        found = differences(model, asked, completions, platform.device())
        assert float(found.max()) < MAX_DIFFERENCE[dtype]
        assert float(found.mean()) < MEAN_DIFFERENCE[dtype]
        assert {v for c in completions for v in c.policy_versions} == {version}
        ids = [[*r.prompt_ids] * 2 for r in asked]
        mask = [[0.0, *[1.0] * (len(row) - 1)] for row in ids]
        trainer.train_batch(TokenBatch.from_sequences(ids, loss_mask=mask), SupervisedLoss())
    assert digests[0] != digests[1]
    stale = teacher(model_dir, trainer, dtype, platform.device())
    wrong = differences(stale, asked, completions, platform.device())
    assert float(wrong.mean()) > 2 * MEAN_DIFFERENCE[dtype], "the check cannot see stale weights"


@pytest.mark.parametrize("dtype", DTYPES)
def test_trainer_and_rollout_agree(platform: PlatformBase, model_dir: Path, dtype: str) -> None:
    """What `mismatch/logprob_abs_*` measures in every RL step."""
    trainer = new_trainer(model_dir, platform, dtype)
    engine = create_rollout_engine("transformers", model_dir, ROLLOUT, dtype, platform)
    send_weights(engine, trainer.get_per_tensor_param(), 0, dtype)
    asked = requests()
    prompts = {request.request_id: request.prompt_ids for request in asked}
    completions = generate_all(engine, asked, timeout_s=120.0)
    batch = TokenBatch.from_sequences(
        [[*prompts[c.request_id], *c.token_ids.tolist()] for c in completions],
        loss_mask=[[0.0] * len(prompts[c.request_id]) + [1.0] * len(c.token_ids)
                   for c in completions],
        rollout_logprobs=[[0.0] * len(prompts[c.request_id]) + c.logprobs.tolist()
                          for c in completions],
    )  # fmt: skip
    found = (trainer.infer_batch(batch).logprobs_T - batch.columns["rollout_logprobs"]).abs()
    assert float(found.max()) < MAX_DIFFERENCE[dtype]
    assert float(found.sum() / batch.columns["loss_mask"].sum()) < MEAN_DIFFERENCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_given_tokens_it_says_what_the_trainer_does(
    platform: PlatformBase, model_dir: Path, dtype: str
) -> None:
    """What a teacher is asked, on the ranks or in an engine of its own."""
    trainer = new_trainer(model_dir, platform, dtype)
    engine = create_rollout_engine("transformers", model_dir, ROLLOUT, dtype, platform)
    send_weights(engine, trainer.get_per_tensor_param(), 0, dtype)
    ids = [[*request.prompt_ids] * 3 for request in requests()]
    mask = [[0.0] * (len(row) // 3) + [1.0] * (len(row) - len(row) // 3) for row in ids]
    asked = [
        PromptRequest(f"r{at}", tuple(row), len(row) // 3, num_top=8) for at, row in enumerate(ids)
    ]
    answers = asyncio.run(engine.prompt_logprobs(asked))
    batch = TokenBatch.from_sequences(ids, loss_mask=mask)
    said = trainer.infer_batch(batch, Readouts(num_top=8))
    assert said.topk_logprobs_TK is not None
    taught = batch.columns["loss_mask"] > 0
    tops = [answer.topk_logprobs_NK for answer in answers if answer.topk_logprobs_NK is not None]
    for ours, theirs in (
        (torch.cat([answer.logprobs_N for answer in answers]), said.logprobs_T[taught]),
        (torch.cat(tops), said.topk_logprobs_TK[taught]),
    ):
        assert ours.shape == theirs.shape
        found = (ours - theirs).abs()
        assert float(found.max()) < MAX_DIFFERENCE[dtype]
        assert float(found.mean()) < MEAN_DIFFERENCE[dtype]


@dataclass(frozen=True)
class Damaging:
    """Loses one bit of one weight on the way."""

    source: WeightSource

    @property
    def checksum_method(self) -> ChecksumMethod:
        return self.source.checksum_method

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.source.tensors():
            if name == "model.norm.weight":
                tensor = tensor.clone()
                tensor.view(torch.uint8)[0] ^= 1
            yield name, tensor


class Damaged(TransformersEngine):
    """Gets one wrong bit."""

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        return await super().update_weights(Damaging(source), version)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_bit_is_found(platform: PlatformBase, model_dir: Path, dtype: str) -> None:
    trainer = new_trainer(model_dir, platform, dtype)
    engine = Damaged(model_dir, ROLLOUT, dtype, platform)
    with pytest.raises(WeightSyncError, match="digest"):
        send_weights(engine, trainer.get_per_tensor_param(), 0, dtype)
    with pytest.raises(RolloutError, match="no confirmed weights"):
        generate_all(engine, requests(), timeout_s=120.0)


def test_sleep_frees_the_device(platform: PlatformBase, model_dir: Path) -> None:
    trainer = new_trainer(model_dir, platform, "float32")
    weights = [tensor for _, tensor in trainer.get_per_tensor_param()]
    held_bytes = sum(t.numel() * t.element_size() for t in weights)
    del weights
    engine: RolloutEngine = create_rollout_engine(
        "transformers", model_dir, ROLLOUT, "float32", platform
    )
    greedy = requests(1, temperature=0.0)
    send_weights(engine, trainer.get_per_tensor_param(), 0)
    first = generate_all(engine, greedy, timeout_s=120.0)
    awake_bytes = platform.memory_allocated_bytes()
    asyncio.run(engine.sleep())
    if platform.device_name != "cpu":
        assert awake_bytes - platform.memory_allocated_bytes() >= held_bytes
    asyncio.run(engine.wake_up())
    send_weights(engine, trainer.get_per_tensor_param(), 1)
    again = generate_all(engine, greedy, timeout_s=120.0)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in first]
