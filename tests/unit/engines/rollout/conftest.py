"""A laboratory of tiny random models: engines that serve them, and a teacher-forced reference."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rlhf.testing.rollout_calls import send_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engines.checkpoint.hub_names import HubNames
from engines.config.rollout import RolloutConfig
from engines.rollout.transformers.engine import TransformersEngine
from engines.types import Completion, RolloutRequest, SamplingParams
from engines.weight_sync.base import WeightDigest
from hardware.cpu import CPUPlatform

EOS = 3


@dataclass(frozen=True)
class Lab:
    """A reference model, and the directory that describes its architecture."""

    model: torch.nn.Module
    directory: Path
    vocab_size: int = 24
    eos: int = EOS

    @staticmethod
    def build(directory: Path, architecture: str = "qwen3", **changes) -> "Lab":
        """Weights are drawn wide, so that logits are far from uniform and errors show."""
        settings = {
            "vocab_size": Lab.vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "initializer_range": 0.25,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            **changes,
        }
        config = AutoConfig.for_model(architecture, **settings)
        config.save_pretrained(directory)
        torch.manual_seed(7)
        return Lab(AutoModelForCausalLM.from_config(config).eval(), directory)

    def other_weights(self, seed: int) -> torch.nn.Module:
        """The same architecture with other weights."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.model.config).eval()

    def bare_engine(self, dtype: str = "float32", **settings) -> TransformersEngine:
        """An engine without weights."""
        return TransformersEngine(self.directory, RolloutConfig(**settings), dtype, CPUPlatform())

    def engine(self, **settings) -> TransformersEngine:
        """An engine that serves the model's weights as version 0."""
        engine = self.bare_engine(**settings)
        self.send(engine, self.model, 0)
        return engine

    @staticmethod
    def send(engine, model, version: int, dtype: str = "float32") -> WeightDigest:
        # As a trainer sends them: by the names on disk.
        named = HubNames(model).stream(model.named_parameters())
        return send_weights(engine, named, version, dtype)

    def requests(
        self,
        num_prompts: int,
        num_samples: int,
        max_new_tokens: int = 12,
        seed: int = 0,
        **sampling,
    ) -> list[RolloutRequest]:
        """Prompts of uneven length, 1 to 20 tokens."""
        draw = random.Random(seed)
        return [
            RolloutRequest(
                f"seed={seed}/prompt={index}",
                tuple(draw.randrange(4, self.vocab_size) for _ in range(draw.randint(1, 20))),
                SamplingParams(max_new_tokens, **sampling),
                tuple(draw.getrandbits(64) for _ in range(num_samples)),
            )
            for index in range(num_prompts)
        ]

    @staticmethod
    @torch.no_grad()
    def teacher_forced(model, request: RolloutRequest, token_ids: Sequence[int]) -> torch.Tensor:
        """Logprobs of the response under the request's distribution, by one plain forward pass."""
        ids = torch.tensor([[*request.prompt_ids, *token_ids]])
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        sampling = request.sampling
        if sampling.temperature > 0:
            warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
            if sampling.top_k:
                warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                warpers.append(TopPLogitsWarper(sampling.top_p))
            logits = warpers(ids, logits)
        return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]

    def worst_difference(
        self, model, requests: Sequence[RolloutRequest], completions: Sequence[Completion]
    ) -> float:
        """Largest |reported - teacher-forced| logprob."""
        by_id = {request.request_id: request for request in requests}
        differences = [
            self.teacher_forced(model, by_id[c.request_id], c.token_ids.tolist())
            - torch.tensor(c.logprobs)
            for c in completions
        ]
        return float(torch.cat(differences).abs().max())


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build_lab(tmp_path: Path):
    return lambda architecture="qwen3", **changes: Lab.build(tmp_path, architecture, **changes)


@pytest.fixture
def long_lab(build_lab):
    """Without an end-of-sequence token every sample runs to its limit."""
    return build_lab(eos_token_id=None)
