"""Vision-language models in one process, against transformers one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from peft import PeftModel
from rlhf.testing.context import OPTIMIZER
from safetensors.torch import save_file
from vision_cases import (
    IMAGE,
    NUM_STEPS,
    VISION_PARTS,
    Grid,
    load,
    make_batch,
    plain_logprobs,
    plain_steps,
    sft,
    write_vision_model,
)

from engines.checkpoint.model_directory import stored_tensor_names
from engines.config.training import LoraConfig, TrainingConfig
from engines.errors import EngineError
from engines.images import ImagePatches
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.transformers.vision import at_every_place
from engines.training.base import flops_of
from engines.training.spec import EngineSpec
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

IMAGES: list[list[Grid]] = [[(1, 4, 4)], [(1, 2, 4)], [(1, 2, 4), (1, 6, 4)]]
MIXED: list[list[Grid]] = [[(1, 4, 4)], [], [(1, 2, 4), (1, 6, 4)], [], [(1, 2, 2)]]
TEXT: list[list[Grid]] = [[], [], []]


def make_engine(path: Path, *, train: bool = True, load_weights: bool = True,
                **training: Any) -> FSDP2Engine:  # fmt: skip
    config = TrainingConfig(**{"max_tokens_per_micro_batch": 30, **training})
    engine = FSDP2Engine(
        EngineSpec(path, config, OPTIMIZER if train else None, 10, CPUPlatform(), 0)
    )
    engine.initialize(load_weights=load_weights)
    return engine


def everything(batch: TokenBatch) -> TokenBatch:
    """The batch without its loss mask: all tokens are computed."""
    return replace(batch, columns={})


def check_steps(engine: FSDP2Engine, rows: Sequence[Sequence[Grid]], expected: list[Any]) -> None:
    for step, (loss, norm) in enumerate(expected):
        update = engine.train_batch(make_batch(step, rows), sft)
        assert update.loss == pytest.approx(loss, abs=1e-5)
        assert update.grad_norm == pytest.approx(norm, rel=1e-4)


def batches(rows: Sequence[Sequence[Grid]]) -> list[TokenBatch]:
    return [make_batch(step, rows) for step in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vlm"))


@pytest.mark.parametrize("model_type", VISION_PARTS)
def test_logprobs_are_those_of_each_sequence_alone(tmp_path: Path, model_type: str) -> None:
    path = write_vision_model(tmp_path, model_type)
    engine, model = make_engine(path, train=False, max_tokens_per_micro_batch=60), load(path)
    with torch.no_grad():
        for rows in (IMAGES, MIXED, TEXT):
            batch = everything(make_batch(0, rows))
            found = engine.infer_batch(batch).logprobs_T
            expected = torch.cat(plain_logprobs(model, batch))
            assert torch.allclose(found, expected, atol=1e-5), rows
        seen = everything(make_batch(0, MIXED))
        assert seen.images is not None
        dark = replace(seen.images, patches=tuple(map(torch.zeros_like, seen.images.patches)))
        other = engine.infer_batch(replace(seen, images=dark)).logprobs_T
    assert (other - engine.infer_batch(seen).logprobs_T).abs().max() > 0.1


@pytest.mark.parametrize("model_type", VISION_PARTS)
def test_samples_that_share_images_train_as_if_each_had_its_own(
    tmp_path: Path, model_type: str
) -> None:
    path = write_vision_model(tmp_path, model_type)
    shared = make_batch(0, MIXED).select([0, 2, 0, 2, 2, 1, 0])
    assert shared.images is not None
    counts = shared.images.num_images_B.tolist()
    patches = shared.images.pixel_values_PD.split(shared.images.num_patches_I.tolist())
    placed = iter(zip(patches, map(tuple, shared.images.grid_thw_I3.tolist()), strict=True))
    copied = ImagePatches.from_sequences([list(islice(placed, count)) for count in counts])
    assert copied is not None
    found = {}
    for name, images in (("once", shared.images), ("each", copied)):
        engine = make_engine(path, max_tokens_per_micro_batch=300)
        sizes: list[int] = []
        engine.model.model.visual.register_forward_pre_hook(
            lambda _, args, sizes=sizes: sizes.append(len(args[0]))
        )
        batch = replace(shared, images=images)
        found[name] = (
            engine.infer_batch(everything(batch)).logprobs_T,
            [engine.train_batch(batch, sft) for _ in range(2)],
            torch.cat([tensor.flatten() for _, tensor in engine.get_per_tensor_param()]),
        )
        assert sizes == [sum(len(each) for each in images.patches)] * 3
    once, each = found["once"], found["each"]
    assert torch.allclose(once[0], each[0], rtol=0, atol=1e-6)
    for ours, theirs in zip(once[1], each[1], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert torch.allclose(once[2], each[2], rtol=0, atol=1e-5)


def test_repeated_image_gradients_are_summed_before_rounding() -> None:
    sizes, index = [3, 2, 4], [0, 2, 0, 1, *[2] * 9]
    draw = torch.Generator().manual_seed(5)
    features = torch.randn(9, 8, generator=draw).bfloat16().requires_grad_()
    shown = at_every_place(features, sizes, index)
    of_images = features.detach().split(sizes)
    assert torch.equal(shown, torch.cat([of_images[image] for image in index]))
    assert shown.dtype == torch.bfloat16
    back = torch.randn(shown.shape, generator=draw).bfloat16()
    shown.backward(back)
    exact = [torch.zeros(size, 8, dtype=torch.float64) for size in sizes]
    for image, part in zip(index, back.split([sizes[image] for image in index]), strict=True):
        exact[image] += part
    assert features.grad is not None
    assert torch.equal(features.grad, torch.cat(exact).bfloat16())


@pytest.mark.parametrize("rows", [IMAGES, MIXED, TEXT], ids=["images", "mixed", "text"])
@pytest.mark.parametrize(
    "training",
    [{"max_tokens_per_micro_batch": 100}, {"gradient_checkpointing": True},
     {"chunked_logprobs": False}, {"param_offload": True, "optimizer_offload": True}],
    ids=["one-micro-batch", "recomputed", "all-logits", "offload"],
)  # fmt: skip
def test_it_trains_as_a_plain_loop_does(
    vision_dir: Path, rows: list[list[Grid]], training: dict[str, Any]
) -> None:
    expected = plain_steps(load(vision_dir), batches(rows))
    check_steps(make_engine(vision_dir, **training), rows, expected)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_other_architectures_train_too(tmp_path: Path, model_type: str) -> None:
    path = write_vision_model(tmp_path, model_type, tie_word_embeddings=True)
    expected = plain_steps(load(path), batches(MIXED))
    check_steps(make_engine(path), MIXED, expected)


@pytest.mark.parametrize("model_type", VISION_PARTS)
def test_without_images_vision_tower_weights_get_zero_gradient(
    tmp_path: Path, model_type: str
) -> None:
    engine = make_engine(write_vision_model(tmp_path, model_type))
    seen: dict[str, torch.Tensor | None] = {}
    clip = engine._clip_gradients

    def spy(max_norm: float) -> float:
        seen.update({name: p.grad for name, p in engine.model.named_parameters()})
        return clip(max_norm)

    engine._clip_gradients = spy
    engine.train_batch(make_batch(0, TEXT), sft)
    tower = {name: grad for name, grad in seen.items() if ".visual." in name}
    assert len(tower) > 10
    assert [name for name, grad in tower.items() if grad is None or grad.any()] == []


def test_a_frozen_tower_stays(vision_dir: Path) -> None:
    engine = make_engine(vision_dir, frozen_parameters=("model.visual.*",))
    model = load(vision_dir)
    before = {name: p.clone() for name, p in engine.model.named_parameters() if "visual" in name}
    expected = plain_steps(model, batches(MIXED), trained=lambda name: ".visual." not in name)
    check_steps(engine, MIXED, expected)
    after = dict(engine.model.named_parameters())
    assert before
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("model_type", VISION_PARTS)
def test_exported_weights_are_what_save_pretrained_writes(tmp_path: Path, model_type: str) -> None:
    path = write_vision_model(tmp_path, model_type)
    engine = make_engine(path)
    engine.train_batch(make_batch(0, MIXED), sft)
    exported = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    assert sorted(exported) == stored_tensor_names(path)
    save_file(exported, path / "model.safetensors", metadata={"format": "pt"})
    model = load(path)
    batch = everything(make_batch(1, MIXED))
    with torch.no_grad():
        expected = torch.cat(plain_logprobs(model, batch))
    assert torch.allclose(engine.infer_batch(batch).logprobs_T, expected, atol=1e-5)


def test_a_checkpoint_continues(vision_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(vision_dir)
    engine.train_batch(make_batch(0, MIXED), sft)
    engine.save_checkpoint(tmp_path, step=1)
    other = make_engine(vision_dir, load_weights=False)
    assert other.load_checkpoint(tmp_path) == 1
    stored = dict(FSDP2Engine.stored_weights(tmp_path, vision_dir))
    for name, tensor in other.get_per_tensor_param():
        assert torch.equal(tensor, stored[name]), name
    batch = make_batch(1, MIXED)
    assert engine.train_batch(batch, sft) == other.train_batch(batch, sft)


def test_an_adapter_is_the_language_models_alone(vision_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(vision_dir, lora=LoraConfig(rank=4, alpha=8.0))
    trained = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("model.language_model.layers.") for name in trained)
    write_adapter(engine, tmp_path)
    theirs = PeftModel.from_pretrained(load(vision_dir), tmp_path, is_trainable=True)
    expected = plain_steps(
        theirs.base_model.model, batches(MIXED), trained=lambda name: ".lora_" in name
    )
    assert sum(p.requires_grad for p in theirs.parameters()) == len(trained)
    check_steps(engine, MIXED, expected)
    merged = theirs.merge_and_unload().state_dict()
    for (name, tensor), (_, held) in zip(
        engine.get_per_tensor_param(), make_engine(vision_dir).get_per_tensor_param(), strict=True
    ):
        in_memory = name.replace("visual.", "model.visual.").replace("model.model.", "model.")
        if name.startswith("model.") and not name.startswith("model.visual."):
            in_memory = name.replace("model.", "model.language_model.", 1)
        assert torch.allclose(tensor, merged[in_memory], atol=1e-5), (name, held.shape)


def test_an_adapter_cannot_name_the_tower(vision_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_modules: got qkv; need some of down_proj"):
        make_engine(vision_dir, lora=LoraConfig(target_modules=("qkv",)))


def with_ids(batch: TokenBatch, change: dict[int, int]) -> TokenBatch:
    ids = batch.input_ids_T.clone()
    for place, token in change.items():
        ids[place] = token
    return replace(batch, input_ids_T=ids)


def test_images_that_do_not_fit_are_named(vision_dir: Path) -> None:
    engine = make_engine(vision_dir, train=False, max_tokens_per_micro_batch=60)
    batch = make_batch(0, MIXED)
    images = batch.images
    assert images is not None
    third = int(batch.cu_seqlens[2])
    first = third + int((batch.input_ids_T[third:] == IMAGE).nonzero()[0])
    for wrong, problem in (
        (with_ids(batch, {first: 5}), "sequence 2 of data-parallel rank 0 has 7 image placeholder "
         "tokens; its images need 8"),
        (with_ids(batch, {int(batch.cu_seqlens[1]): IMAGE}), "sequence 1 of .* has 1 image .* 0"),
        (with_ids(batch, {first + 2: IMAGE, first + 3: IMAGE}), "sequence 2 .* has 10 .* need 8"),
        (replace(batch, images=None), "sequence 0 .* has 4 image placeholder tokens; .* need 0"),
        (replace(batch, images=replace(images, grid_thw_U3=images.grid_thw_U3[:, [1, 0, 2]])),
         "sequence 0 .* does not divide by the model's merge size 2"),
        (replace(batch, images=replace(images, patches=tuple(x[:, 1:] for x in images.patches))),
         "sequence 0 .* has image patches of 23 values; the model needs 24"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=problem):
            engine.infer_batch(wrong)


def test_a_text_model_refuses_images(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir, train=False)
    with pytest.raises(EngineError, match="sequence 0 of data-parallel rank 0 has an image, but"):
        engine.infer_batch(make_batch(0, IMAGES))


def test_layouts_that_cannot_see_are_refused_in_one_line(vision_dir: Path, tmp_path: Path) -> None:
    def engine(path: Path, model_type: Any = "language_model", **training: Any) -> None:
        config = TrainingConfig(**training)
        FSDP2Engine(EngineSpec(path, config, None, 1, CPUPlatform(), 0, 1.0, model_type))

    sees = r"model.path: .* is a qwen2_5_vl, which sees images; "
    with pytest.raises(ConfigError, match=sees + "megatron .* use fsdp or fsdp2"):
        engine(vision_dir, backend="megatron")
    with pytest.raises(ConfigError, match=sees + "a value model cannot"):
        engine(vision_dir, "value_model")
    with pytest.raises(ConfigError, match=sees + "Ulysses cannot cut them"):
        engine(vision_dir, ulysses_size=2, num_workers=2)
    (tmp_path / "config.json").write_text('{"model_type": "idefics3", "vision_config": {"a": 1}}')
    with pytest.raises(ConfigError, match="is a idefics3, which sees images; of those only"):
        engine(tmp_path)


@pytest.mark.parametrize("model_type", VISION_PARTS)
def test_operations_are_those_of_the_language_model(tmp_path: Path, model_type: str) -> None:
    path = write_vision_model(tmp_path, model_type)
    counted = flops_of(EngineSpec(path, TrainingConfig(), None, 1, CPUPlatform(), 0))
    assert counted is not None
    flops = counted.model
    # Two layers of 32: q and o of four heads, k and v of two, of 8 each; a gated layer of 48.
    assert flops.layers_per_token == 2 * 2 * (32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48)
    assert flops.head_per_token == 2 * 32 * 37
