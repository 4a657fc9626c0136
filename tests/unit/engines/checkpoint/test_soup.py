"""The mean of several models' weights, against numbers worked out by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.jobs.soup import mean_tensors
from infra.errors import ConfigError


def write(directory: Path, *files: dict[str, Tensor]) -> Path:
    directory.mkdir()
    for place, tensors in enumerate(files):
        save_file(tensors, directory / f"model-{place}.safetensors")
    return directory


def test_every_weight_is_the_mean_wherever_it_lies(tmp_path: Path) -> None:
    numbers = {"ids": torch.tensor([3])}
    one = write(tmp_path / "a", {"w": torch.tensor([1.0, 2.0])}, {"v": torch.tensor([[4.0]])})
    other = write(tmp_path / "b", {"v": torch.tensor([[1.0]]), "w": torch.tensor([3.0, -2.0])})
    third = write(tmp_path / "c", {"w": torch.tensor([2.0, 3.0]), "v": torch.tensor([[1.0]])})
    for directory in (one, other, third):
        save_file(numbers, directory / "model-9.safetensors")
    found = dict(mean_tensors([one, other, third]))
    assert {name: mean.tolist() for name, mean in found.items()} == {
        "w": [2.0, 1.0], "v": [[2.0]], "ids": [3],
    }  # fmt: skip


def test_low_precision_is_summed_in_float32(tmp_path: Path) -> None:
    # 256 + 1 is no bfloat16, and so a sum in it would forget the 1.
    values = (256.0, 1.0, 1.0)
    models = [
        write(tmp_path / f"{at}", {"w": torch.tensor([value], dtype=torch.bfloat16)})
        for at, value in enumerate(values)
    ]
    [(_, mean)] = mean_tensors(models)
    assert (mean.dtype, mean.item()) == (torch.float32, 86.0)
    assert load_file(models[0] / "model-0.safetensors")["w"].item() == 256.0, "left as it was"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"v": torch.ones(2)}, r"has \(2,\) as v, the first model none"),
        ({"w": torch.ones(3)}, r"has \(3,\) as w, the first model \(2,\)"),
    ],
)
def test_other_weights_are_refused_by_name(
    tmp_path: Path, other: dict[str, Tensor], said: str
) -> None:
    models = [write(tmp_path / "a", {"w": torch.ones(2)}), write(tmp_path / "b", other)]
    with pytest.raises(ConfigError, match=said):
        list(mean_tensors(models))


def test_what_is_no_number_to_average_has_to_be_equal(tmp_path: Path) -> None:
    models = [write(tmp_path / f"{at}", {"ids": torch.tensor([at])}) for at in range(2)]
    with pytest.raises(ConfigError, match="the models differ in ids, "):
        list(mean_tensors(models))
