"""The embedded rollout engine against `transformers.generate`: same model, requests and dtype."""

from collections.abc import Iterator

import torch
from gpu_figures import Figure, Goal, Setup
from gpu_training import TIMEOUT_S, requests_of, seconds_of
from measure import Measurement, turn_by_turn
from rlhf.testing.rollout_calls import generate_all, send_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.config.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine, create_rollout_engine
from engines.types import RolloutRequest
from hardware.base import PlatformBase

GENERATE_GOAL = Goal(3.0)
MAX_NUM_TURNS, NUM_WARM_UP_TOKENS = 2, 16
"""A turn of `generate` takes most of what a measurement may take."""


def embedded_rollout(setup: Setup) -> Iterator[Figure]:
    """Tokens per second of both, in turns; every sample has its full length or ends by itself."""
    platform = setup.open_platform()
    model = AutoModelForCausalLM.from_pretrained(setup.hf_dir, dtype=getattr(torch, setup.dtype))
    model = model.to(platform.device()).eval()
    rollout = RolloutConfig(max_num_sequences=setup.num_samples, timeout_s=TIMEOUT_S)
    engine = create_rollout_engine("transformers", setup.hf_dir, rollout, setup.dtype, platform)
    send_weights(engine, model.named_parameters(), 0, setup.dtype)
    warm = requests_of(setup, 0, max_new_tokens=NUM_WARM_UP_TOKENS)
    ours_tokens_per_s(engine, platform, warm)
    hf_tokens_per_s(model, platform, warm)
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(min(setup.num_repeats, MAX_NUM_TURNS)):
        requests = requests_of(setup, turn + 1)
        ours.append(ours_tokens_per_s(engine, platform, requests))
        theirs.append(hf_tokens_per_s(model, platform, requests))
    sides = Measurement(tuple(ours)), Measurement(tuple(theirs))
    yield Figure("embedded_rollout", "embedded engine", "tokens/s", sides[0])
    yield Figure("embedded_rollout", "transformers.generate", "tokens/s", sides[1])
    ratio = turn_by_turn(*sides)
    yield Figure("embedded_rollout", "engine over generate", "", ratio, GENERATE_GOAL)


def ours_tokens_per_s(
    engine: RolloutEngine, platform: PlatformBase, requests: list[RolloutRequest]
) -> float:
    """Of one batch of requests."""
    tokens: list[int] = []
    seconds = seconds_of(
        platform,
        lambda: tokens.extend(len(done.token_ids) for done in generate_all(engine, requests)),
    )
    return sum(tokens) / seconds


def hf_tokens_per_s(
    model: PreTrainedModel, platform: PlatformBase, requests: list[RolloutRequest]
) -> float:
    """Of one call with all samples as rows; tokens behind a row's end do not count."""
    rows = [request.prompt_ids for request in requests for _ in request.seeds]
    ids = torch.tensor(rows, device=platform.device())
    stop = model.generation_config.eos_token_id
    outputs: list[torch.Tensor] = []

    def call() -> None:
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=requests[0].sampling.max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        assert isinstance(found, torch.Tensor)
        outputs.append(found[:, ids.shape[1] :])

    seconds = seconds_of(platform, call)
    ended = (outputs[0] == stop).int()
    is_before_end = ended.cumsum(dim=1) - ended == 0
    return int(is_before_end.sum()) / seconds
