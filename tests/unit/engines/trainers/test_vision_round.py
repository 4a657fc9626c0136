"""A round of RL over Geometry3k's rows: one image in what samples and in what trains."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights
from vision_cases import write_chat_model, write_geometry

from engines.checkpoint.tensor_files import stored_tensors
from engines.config.algorithm import RewardConfig
from engines.config.rollout import RolloutConfig
from engines.config.sections import EvaluationConfig
from engines.data.image_store import ImageFile
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import rl_prompts
from engines.data.read.lazy_sequence import MappedRows
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import WeightSyncError
from engines.images import ImagePatches
from engines.rewards.scorer import RewardScorer
from engines.rollout.transformers.engine import TransformersEngine
from engines.trainers.evaluation.evaluator import Evaluator
from engines.trainers.scoring import CompletionScorer
from engines.types import Completion, RolloutRequest
from engines.vision.processor import PromptImages, prompt_images
from hardware.cpu import CPUPlatform


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_geometry(tmp_path / "dataset")


@pytest.fixture
def rows(tmp_path: Path, dataset: Path) -> Iterator[MappedRows[RLRow]]:
    with closing(MappedRows(load_dataset(dataset).rl_rows(), tmp_path)) as rows:
        yield rows


def test_what_samples_and_what_trains_see_one_image(
    run_round: Any, model: Path, dataset: Path
) -> None:
    first, second = run_round(
        "odd_length", prompts=(model, dataset), kl_coef=None, algorithm={"kl_loss_coef": 0.1}
    )
    assert all(math.isfinite(value) for value in (*first.values(), *second.values()))
    assert first["actor/grad_norm"] > 0
    assert first["mismatch/logprob_abs_mean"] < 1e-5
    assert second["mismatch/logprob_abs_mean"] < 1e-5
    assert second["training/policy_version"] == 2


def test_another_image_in_training_is_found(run_round: Any, model: Path, dataset: Path) -> None:
    def blind(images: PromptImages) -> None:
        seen = images.processor.of_sequences

        def other(files: Any) -> ImagePatches | None:
            found = seen(files)
            assert found is not None
            return replace(found, patches=tuple(torch.zeros_like(each) for each in found.patches))

        images.processor.of_sequences = other  # type: ignore[method-assign]

    with pytest.raises(WeightSyncError, match="mismatch"):
        run_round("odd_length", prompts=(model, dataset), see=blind)


def test_images_are_read_when_their_prompt_is_sampled(
    run_round: Any, model: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = ImageFile.read
    monkeypatch.setattr(
        ImageFile, "read", lambda file, name: (read.append(name), plain(file, name))[1]
    )
    run_round("odd_length", prompts=(model, dataset), batch_size_prompts=2)
    assert 4 <= len(read) <= 8


def test_an_evaluation_shows_the_images_too(
    model: Path, dataset: Path, rows: MappedRows[RLRow]
) -> None:
    data = load_dataset(dataset)
    tokenizer = DirectoryTokenizer.load(model)
    images = prompt_images(model, data.images_path)
    assert images is not None
    engine = TransformersEngine(model, RolloutConfig(), "float32", CPUPlatform())
    send_weights(engine, stored_tensors(model), 0)
    asked: list[RolloutRequest] = []

    def generate(requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        asked.extend(requests)
        return [[each] for each in generate_all(engine, requests)]

    with RewardScorer(RewardConfig(function="exact")) as rewards:
        evaluation = Evaluator(
            EvaluationConfig(max_new_tokens=4, num_samples=0),
            rl_prompts(rows, tokenizer, expanded=images.expanded),
            CompletionScorer(rewards, tokenizer),
            seed=1,
            images=images,
        ).run(generate, lambda done, total: None)
    asyncio.run(engine.close())
    assert evaluation.metrics["num_problems"] == len(rows)
    assert [request.images for request in asked] == [images.encoded(row) for row in rows]
    assert evaluation.problems[1].prompt_text.count("\u2460") == 2
