"""A round of RL over Geometry3k's rows: one image in what samples and in what trains."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_cases import write_chat_model, write_geometry

from engines.data.images.store import ImageFile
from engines.errors import WeightSyncError
from engines.images import ImagePatches
from engines.vision.processor import PromptImages


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return write_chat_model(path)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_geometry(tmp_path / "dataset")


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
            return ImagePatches(
                torch.zeros_like(found.pixel_values_PD), found.grid_thw_I3, found.num_images_B
            )

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
