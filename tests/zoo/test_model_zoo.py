"""Families that recipes and guides name do everything; the checks see what is wrong on purpose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_checks
import pytest
import torch
from family_checks import Family, agrees, builds, exports, samples, trains
from model_zoo import try_family
from plain_reference import Lacking, relative_error
from safetensors.torch import load_file, save_file
from served_table import FAMILIES
from torch import Tensor
from transformers import BertConfig
from zoo_table import COLUMNS

from engines.algorithms.supervised import SupervisedLoss
from engines.training.backends.merging import merge_checkpoint
from engines.training.model.attention import Packing
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch

DEADLINE_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*FAMILIES, "gpt2"])
def test_a_family_that_recipes_name_does_everything(model_type: str, tmp_path: Path) -> None:
    result = try_family(model_type, tmp_path / "work", DEADLINE_S, "now")
    assert result.why_not == ""
    assert result.outcomes == dict.fromkeys(COLUMNS, True)
    assert result.sources == "now"
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_family_whose_attention_is_its_own_says_so(tmp_path: Path) -> None:
    result = try_family("bloom", tmp_path / "work", DEADLINE_S)
    assert result.outcomes == {"builds": True, "trains": False}
    assert "it is a BloomForCausalLM, whose attention cannot be replaced" in result.why_not


@pytest.mark.slow
def test_a_family_that_takes_too_long_ends_nothing_else(tmp_path: Path) -> None:
    result = try_family("qwen2", tmp_path / "work", 0.01)
    assert result.outcomes == {"builds": False}
    assert result.why_not == "it takes longer than 0.01 s"
    assert not (tmp_path / "work").exists()


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """One that is built."""
    family = Family("qwen2", tmp_path)
    builds(family)
    return family


def test_what_is_no_causal_model_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96,
    )  # fmt: skip
    monkeypatch.setattr(family_checks, "tiny_config", lambda model_type: encoder)
    with pytest.raises(Lacking, match="logits depend on later tokens"):
        builds(Family("bert", tmp_path))


def test_sequences_that_see_each_other_are_seen(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(cu_seqlens: Tensor, group: Any = None) -> Packing:
        length = int(cu_seqlens[-1])
        return Packing(cu_seqlens[[0, -1]], ((1, length),), length, group)

    monkeypatch.setattr(Packing, "from_cu_seqlens", staticmethod(joined))
    with pytest.raises(Lacking, match="packed sequences see each other"):
        trains(family)


class Spoiled:
    """The loss of SFT, whose value or gradient is 1 % too large."""

    def __init__(self, what: str) -> None:
        self._what, self._loss = what, SupervisedLoss()

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        if self._what == "gradient":
            outputs.logprobs_T.register_hook(lambda grad: 1.01 * grad)
        loss = self._loss(outputs, batch, counts)
        return loss if self._what == "gradient" else LossOutput(1.01 * loss.loss)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_another_loss_or_gradient_is_seen(
    family: Family, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(family_checks, "SupervisedLoss", lambda: Spoiled(what))
    with pytest.raises(Lacking, match=rf"its {what} "):
        trains(family)


def test_logprobs_of_other_weights_are_seen(family: Family) -> None:
    trains(family)
    samples(family)
    agrees(family)
    assert family.engine is not None
    with torch.no_grad():
        next(family.engine.model.parameters()).mul_(1.1)
    with pytest.raises(Lacking, match="differ by .* from the trainer's"):
        agrees(family)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda tensors: next(iter(tensors.values())).mul_(1.001), "reloaded logits differ"),
        (lambda tensors: tensors.pop("model.norm.weight"), "has missing_keys: model.norm.weight"),
    ],
    ids=["value", "missing"],
)
def test_an_export_of_other_weights_is_seen(
    family: Family,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[dict[str, Tensor]], object],
    what: str,
) -> None:
    def merge(policy: Path, out: Path, dtype: str, max_shard_bytes: int) -> None:
        merge_checkpoint(policy, out, dtype, max_shard_bytes)
        tensors = load_file(out / "model.safetensors")
        spoil(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    trains(family)
    monkeypatch.setattr(family_checks, "merge_checkpoint", merge)
    with pytest.raises(Lacking, match=what):
        exports(family)


def test_a_relative_error_by_hand() -> None:
    wanted = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "c": None}
    assert relative_error({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, wanted) == 0
    found = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])}
    assert relative_error(found, wanted) == pytest.approx(1 / 5)
    assert relative_error({"a": wanted["a"]}, wanted) == pytest.approx(4 / 5)
    with pytest.raises(Lacking, match="a gradient for d"):
        relative_error({**found, "d": torch.ones(1)}, wanted)
