"""A rollout engine before a tiny model: `python tests/zoo/served_probe.py ENGINE DIRECTORY`.

Runs in the engine's own environment, where nothing trains. In the directory lie `hf`, the model as
it was before its step, and `trained.safetensors`, the weights after it. What the engine says of the
trained weights goes to `answers.json`, anew at each column that holds: a process that crashes
leaves what it reached. Promises: the same requests for every engine and family; the weights come
after others, so that whatever an engine packed, tied or cached of those would show.
"""

import asyncio
import sys
from pathlib import Path

from rlhf.testing.served_engine import OPTIONS
from tiny_family import random_sequences
from zoo_table import reason_of

from engines.config.base import StrictModel
from engines.config.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine, create_rollout_engine
from engines.rollout.collect import collect
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.types import RolloutRequest, SamplingParams
from engines.weight_sync.in_process import SafetensorsSource
from hardware.cpu import CPUPlatform

ANSWERS, WEIGHTS = "answers.json", "trained.safetensors"
TIMEOUT_S = 240.0
"""Of each wait for the engine."""
NUM_TOP = 4
PROMPT_LENGTHS = (9, 3, 14, 40)
MAX_NEW_TOKENS = 16


class SampledAnswer(StrictModel):
    """One sample.

    Attributes:
        prompt_ids: that it continues.
        token_ids: that were sampled.
        logprobs: of each of them.
        greedy: whether it is the likeliest at each step, else one at temperature 1.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: bool


class PromptAnswer(StrictModel):
    """What is said of a sequence from its second token on.

    Attributes:
        token_ids: of the sequence.
        logprobs: of all but the first.
        top_ids: of each place the likeliest tokens, the likeliest first.
        top_logprobs: theirs.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


class Answers(StrictModel):
    """What an engine does with a model.

    Attributes:
        reached: columns that hold as far as the engine itself can say, in order.
        problem: why the next one does not; empty where all hold.
        samples: greedy and not.
        prompts: of sequences that are given.
    """

    reached: tuple[str, ...] = ()
    problem: str = ""
    samples: tuple[SampledAnswer, ...] = ()
    prompts: tuple[PromptAnswer, ...] = ()

    def keep(self, root: Path) -> None:
        """Write it where `kept_answers` finds it, whole or not at all."""
        draft = root / f"{ANSWERS}.tmp"
        draft.write_text(self.model_dump_json(), encoding="utf-8")
        draft.replace(root / ANSWERS)


def kept_answers(root: Path) -> Answers:
    """What was written last; nothing at all where nothing was."""
    path = root / ANSWERS
    return Answers.model_validate_json(path.read_text("utf-8")) if path.exists() else Answers()


def sample_requests() -> list[RolloutRequest]:
    """Each prompt once greedy and twice at temperature 1."""
    return [
        RolloutRequest(
            f"prompt={i}/temperature={temperature:g}",
            tuple(ids),
            SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature),
            seeds=(2 * i, 2 * i + 1) if temperature else (0,),
        )
        for i, ids in enumerate(random_sequences(PROMPT_LENGTHS))
        for temperature in (0.0, 1.0)
    ]


def prompt_requests() -> list[PromptRequest]:
    """Of whole sequences, with the likeliest tokens."""
    return [
        PromptRequest(f"sequence={i}", tuple(ids), num_top=NUM_TOP)
        for i, ids in enumerate(random_sequences(PROMPT_LENGTHS))
    ]


async def ask(engine: RolloutEngine, root: Path, answers: Answers) -> Answers:
    """Send the weights and ask; what is reached is written at each column.

    Args:
        engine: that has started.
        root: the directory.
        answers: so far.

    Returns:
        The answers; an error of the engine is their problem.
    """
    try:
        for version, path in enumerate((root / "hf" / "model.safetensors", root / WEIGHTS)):
            receipt = await engine.update_weights(SafetensorsSource(path), version)
            await engine.finish_update(version, receipt.digest)
            await engine.score([random_sequences((5,))[0]], 1.0)
        answers = _reached(answers, root, "updates")
        answers = _reached(answers, root, "samples", samples=await _samples(engine))
        prompts = await engine.prompt_logprobs(prompt_requests())
        rows = tuple(map(_prompt_answer, prompt_requests(), prompts))
        return _reached(answers, root, "prompts", prompts=rows)
    except Exception as error:  # noqa: BLE001 (whatever an engine does is its row)
        return answers.model_copy(update={"problem": reason_of(error, root)})
    finally:
        await engine.close()


async def _samples(engine: RolloutEngine) -> tuple[SampledAnswer, ...]:
    asked = sample_requests()
    rows = await collect(engine, asked, TIMEOUT_S)
    return tuple(
        SampledAnswer(
            prompt_ids=request.prompt_ids,
            token_ids=tuple(each.token_ids.tolist()),
            logprobs=tuple(each.logprobs.tolist()),
            greedy=request.sampling.temperature == 0,
        )
        for request, row in zip(asked, rows, strict=True)
        for each in row
    )


def _prompt_answer(request: PromptRequest, said: PromptLogprobs) -> PromptAnswer:
    assert said.topk_ids_NK is not None
    assert said.topk_logprobs_NK is not None
    return PromptAnswer(
        token_ids=request.token_ids,
        logprobs=tuple(said.logprobs_N.tolist()),
        top_ids=tuple(map(tuple, said.topk_ids_NK.tolist())),
        top_logprobs=tuple(map(tuple, said.topk_logprobs_NK.tolist())),
    )


def _reached(answers: Answers, root: Path, column: str, **found: object) -> Answers:
    known = answers.model_copy(update={"reached": (*answers.reached, column), **found})
    known.keep(root)
    return known


def main() -> int:
    """Start the engine and ask it."""
    name, root = sys.argv[1], Path(sys.argv[2])
    rollout = RolloutConfig(
        engine=name, timeout_s=TIMEOUT_S, max_num_sequences=6, options=OPTIONS[name]
    )
    answers = Answers()
    try:
        engine = create_rollout_engine(name, root / "hf", rollout, "float32", CPUPlatform())
    except Exception as error:  # noqa: BLE001 (as above)
        answers = answers.model_copy(update={"problem": reason_of(error, root)})
    else:
        answers = asyncio.run(ask(engine, root, _reached(answers, root, "starts")))
    answers.keep(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
