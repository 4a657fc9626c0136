"""Rows that show images in a round of RL: read with their prompts, seen by everyone or refused."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loaded_rows import write_rows
from vision_cases import write_chat_model, write_geometry

from engines.config.stages.rl import RLRoundStageConfig
from engines.data.read.dataset import RL_FILE, load_dataset
from engines.data.read.row_files import RL_FORMAT
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.rl_round import _prompts
from engines.trainers.prompts import PromptSource
from infra.errors import ConfigError

SERVED = {"num_top": 4, "served": {}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_geometry(tmp_path / "dataset")


def asked(model: Path, dataset: Path, **rl: Any) -> PromptSource:
    config = RLRoundStageConfig.model_validate(
        {
            "round": 1,
            "model": {"path": str(model), "max_length": 64},
            "training": {},
            "rollout": {},
            "rl": {"batch_size_prompts": 2, "sampling": {"max_new_tokens": 4}, **rl},
            "checkpoint": {},
        }
    )
    context: Any = SimpleNamespace(
        config=config,
        spec=SimpleNamespace(seed=0),
        input={"dataset": dataset}.__getitem__,
        attempt_dir=dataset.parent,
    )
    with ExitStack() as stack:
        source = _prompts(context, stack, model, DirectoryTokenizer.load(model))
        for batch in source.generation_batches(1):
            images = source.images
            shown = [images.encoded(row) if images else () for row in batch.rows]
            assert [request.images for request in batch.requests] == shown
    return source


def test_requests_have_the_images_of_their_rows(model: Path, dataset: Path) -> None:
    assert asked(model, dataset).images is not None


def test_a_lost_file_of_images_is_the_data_set_s(model: Path, dataset: Path) -> None:
    (dataset / "images.parquet").unlink()
    with pytest.raises(ConfigError, match=rf"^dataset: {dataset} has no images\.parquet, though"):
        asked(model, dataset)


def test_engines_of_a_teacher_are_not_shown_them(model: Path, dataset: Path) -> None:
    num_rows = len(load_dataset(dataset).rl_rows())
    with pytest.raises(ConfigError) as found:
        asked(model, dataset, distillation={"path": str(model), **SERVED})
    assert str(found.value) == (
        f"rl.distillation.served: {num_rows} of {num_rows} rows show images, which served teachers "
        "cannot see; need a teacher on the training ranks; set this to null, or leave out the "
        "source"
    )
    asked(model, dataset, distillation={"path": str(model), "num_top": 4})


def test_a_model_that_judges_is_not_shown_them(model: Path, dataset: Path) -> None:
    judge = {"path": str(model), "prompt": "{{ answer }}"}
    with pytest.raises(ConfigError, match=r"^rl\.reward\.judge: got a model that judges; . of . r"):
        asked(model, dataset, reward={"function": "judge", "judge": judge})


def test_round_ignores_images_found_only_in_held_out_rows(model: Path, dataset: Path) -> None:
    row = RLRow("s", (Message("user", "1+1?"),), "", RewardModel("rule", "2"))
    write_rows(dataset / RL_FILE, RL_FORMAT, [row, row])
    asked(model, dataset, distillation={"path": str(model), **SERVED})
