"""Sampling from models that see, against the plain model of transformers one sequence at a time."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.rollout_calls import send_weights, send_weights_async
from vision_cases import (
    END,
    IMAGE,
    START,
    VIDEO,
    VISION_PARTS,
    load,
    picture,
    plain_logprobs,
    write_processor,
    write_vision_model,
)

from engines.checkpoint.tensor_files import stored_tensors
from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.transformers.engine import TransformersEngine
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch
from engines.vision.processor import ImageProcessor
from hardware.cpu import CPUPlatform
from infra.errors import ConfigError

WIDE, TALL, SMALL = picture(1), picture(2, 5, 13), picture(3, 4, 4)


@pytest.fixture(scope="module", params=VISION_PARTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    return write_processor(path)


@pytest.fixture
def engine(directory: Path) -> Iterator[TransformersEngine]:
    made = TransformersEngine(directory, RolloutConfig(), "float32", CPUPlatform())
    send(made, directory, 0)
    yield made
    asyncio.run(made.close())


def send(engine: TransformersEngine, directory: Path, version: int, factor: float = 1.0) -> None:
    weights = [(name, tensor * factor) for name, tensor in stored_tensors(directory)]
    send_weights(engine, weights, version)


def prompt(processor: ImageProcessor, seed: int, *images: bytes) -> tuple[int, ...]:
    """Words and, between them, each image."""
    words = random.Random(seed)
    ids = [words.randrange(3, 29) for _ in range(4)]
    for data in images:
        _, (t, h, w) = processor.patches(data)
        ids += [START, *[IMAGE] * (t * h * w // 4), END, words.randrange(3, 29)]
    return tuple(ids)


def requests(directory: Path) -> list[RolloutRequest]:
    processor = ImageProcessor(directory)
    shown = [(WIDE,), (), (TALL, SMALL), (WIDE, WIDE), ()]
    sampling = SamplingParams(max_new_tokens=7, temperature=1.3)
    return [
        RolloutRequest(f"r={i}", prompt(processor, i, *images), sampling, (3 * i, 5), images=images)
        for i, images in enumerate(shown)
    ]


def generate(
    engine: TransformersEngine, asked: Sequence[RolloutRequest]
) -> dict[tuple[str, int], Completion]:
    async def collect() -> list[Completion]:
        return [each async for each in engine.generate(asked)]

    return {(each.request_id, each.sample_index): each for each in asyncio.run(collect())}


def check_logprobs(
    directory: Path,
    asked: Sequence[RolloutRequest],
    found: dict[tuple[str, int], Completion],
) -> None:
    """What was reported is what the plain model says of the whole sequence."""
    model = load(directory)
    processor = ImageProcessor(directory)
    for request in asked:
        for place in range(request.num_samples):
            completion = found[request.request_id, place]
            ids = [*request.prompt_ids, *completion.token_ids]
            patches = processor.of_sequences([request.images])
            batch = TokenBatch.from_sequences([ids], images=patches)
            logprobs = plain_logprobs_at(model, batch, request.sampling.temperature)
            expected = logprobs[len(request.prompt_ids) :]
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=1e-5
            )


@torch.no_grad()
def plain_logprobs_at(model: Any, batch: TokenBatch, temperature: float) -> torch.Tensor:
    """Of the first sequence; its placeholders, of images and of videos, are never drawn."""

    def changed(module: object, args: object, logits: torch.Tensor) -> torch.Tensor:
        never = torch.tensor([IMAGE, VIDEO])
        return (logits / temperature).index_fill(-1, never, -torch.inf)

    hook = model.get_output_embeddings().register_forward_hook(changed)
    try:
        return plain_logprobs(model, batch)[0]
    finally:
        hook.remove()


def test_samples_are_of_the_model_and_of_their_images(
    engine: TransformersEngine, directory: Path
) -> None:
    asked = requests(directory)
    found = generate(engine, asked)
    assert len(found) == 10
    assert any(len(each.token_ids) == 7 for each in found.values())
    check_logprobs(directory, asked, found)
    # Alone, and beside others.
    for request in asked:
        alone = generate(engine, [request])
        for key, completion in alone.items():
            assert completion.token_ids.tolist() == found[key].token_ids.tolist()
    other = replace(asked[0], images=(picture(9, 12, 6),))
    assert generate(engine, [other])["r=0", 0] != found["r=0", 0]


def test_late_samples_of_a_prompt_continue_after_its_images(directory: Path) -> None:
    """The prompt was computed once, for the first of them."""
    small = TransformersEngine(
        directory, RolloutConfig(max_num_sequences=3), "float32", CPUPlatform()
    )
    send(small, directory, 0)
    asked = [replace(requests(directory)[3], seeds=tuple(range(8)))]
    found = generate(small, asked)
    asyncio.run(small.close())
    assert len(found) == 8
    check_logprobs(directory, asked, found)


def test_new_weights_see_too_also_for_samples_in_flight(
    engine: TransformersEngine, directory: Path
) -> None:
    asked = requests(directory)

    async def interrupted() -> list[Completion]:
        stream = engine.generate(asked)
        task = asyncio.create_task(collect(stream))
        while not len(engine._batch.samples):
            await asyncio.sleep(0)
        await engine.pause()
        weights = [(name, tensor * 1.2) for name, tensor in stored_tensors(directory)]
        await send_weights_async(engine, weights, 1)
        await engine.resume()
        return await task

    async def collect(stream: AsyncIterator[Completion]) -> list[Completion]:
        return [each async for each in stream]

    found = {(c.request_id, c.sample_index): c for c in asyncio.run(interrupted())}
    versions = {version for each in found.values() for version in each.policy_versions}
    assert versions == {0, 1}
    model = {0: 1.0, 1: 1.2}
    for request in asked:
        for place in range(2):
            completion = found[request.request_id, place]
            for version, factor in model.items():
                wanted = [
                    i for i, v in enumerate(completion.policy_versions.tolist()) if v == version
                ]
                check_some(directory, request, completion, wanted, factor)


def check_some(
    directory: Path,
    request: RolloutRequest,
    completion: Completion,
    wanted: list[int],
    factor: float,
) -> None:
    model = load(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    patches = ImageProcessor(directory).of_sequences([request.images])
    ids = [*request.prompt_ids, *completion.token_ids]
    batch = TokenBatch.from_sequences([ids], images=patches)
    logprobs = plain_logprobs_at(model, batch, request.sampling.temperature)
    expected = logprobs[len(request.prompt_ids) :][wanted]
    found = torch.tensor(completion.logprobs)[wanted]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_images_and_placeholders_that_do_not_fit_are_named(
    engine: TransformersEngine, directory: Path
) -> None:
    first = requests(directory)[0]
    for wrong in (
        replace(first, images=()),
        replace(first, images=(SMALL,)),
        replace(first, images=(WIDE, WIDE)),
    ):
        with pytest.raises(RolloutError, match="image placeholder tokens; its images need"):
            generate(engine, [wrong])


def test_scoring_text(engine: TransformersEngine, directory: Path) -> None:
    ids = prompt(ImageProcessor(directory), 4)
    (found,) = asyncio.run(engine.score([ids], 1.0))
    with torch.no_grad():
        expected = plain_logprobs_at(load(directory), TokenBatch.from_sequences([ids]), 1.0)[1:]
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-5, rtol=1e-5)


def test_logprobs_of_text_have_every_token(engine: TransformersEngine, directory: Path) -> None:
    """Placeholders too, which are never drawn but are in the distribution that is trained."""
    texts = [prompt(ImageProcessor(directory), seed) for seed in (4, 5)]
    asked = [PromptRequest(f"r={i}", ids, num_top=37) for i, ids in enumerate(texts)]
    model = load(directory)
    for answer, ids in zip(asyncio.run(engine.prompt_logprobs(asked)), texts, strict=True):
        [expected] = plain_logprobs(model, TokenBatch.from_sequences([ids]))
        torch.testing.assert_close(answer.logprobs_N, expected[1:], atol=2e-5, rtol=1e-5)
        assert answer.topk_ids_NK is not None
        assert IMAGE in answer.topk_ids_NK[0].tolist()


def test_logprobs_of_what_stands_for_images_are_refused(
    engine: TransformersEngine, directory: Path
) -> None:
    ids = requests(directory)[0].prompt_ids
    with pytest.raises(RolloutError, match=f"stand for images, .* {IMAGE}; need"):
        asyncio.run(engine.prompt_logprobs([PromptRequest("r", ids)]))


def test_an_engine_of_a_text_model_refuses_images(build_lab) -> None:  # noqa: ANN001
    engine = build_lab("qwen3").engine()
    request = RolloutRequest("r", (5, 6), SamplingParams(2), (0,), images=(SMALL,))
    with pytest.raises(RolloutError, match="r: got 1 images; engine or model takes none"):
        engine.generate([request])


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "idefics3", "vision_config": {"a": 1}}')
    with pytest.raises(ConfigError, match="is a idefics3, which sees images; of those the rollout"):
        TransformersEngine(tmp_path, RolloutConfig(), "float32", CPUPlatform())
