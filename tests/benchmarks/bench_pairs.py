"""Preferences: our DPO and reward model against TRL's trainers, both on the CPU.

All train the same 0.85 M parameter model in float32 with AdamW on the same pairs: a prompt of 16 to
96 tokens and two answers of 16 to 128, 32 pairs an optimizer step, no gradient checkpointing. DPO's
reference is the model as it was; both sides compute its log-probabilities in the step. TRL pads the
pairs of a pass to the longest; it is asked with 8, 16 and 32 pairs a pass, and its fastest counts.
Ours has micro-batches of 2,048 tokens, which is what eight pairs have on average: a cache holds
their activations.
Preparing a batch is part of a step; starting up and tokenizing are not.

Run: python tests/benchmarks/bench_pairs.py [--repeats N] [--threads N]
"""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from tiny_model import EOS_TOKEN_ID, NUM_SPECIAL, word, write_model

from engines.algorithms.preference.options import RewardModelOptions
from engines.config.sections import PreferenceConfig, RewardTrainingConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.worker_group import InProcessGroup, WorkerGroup
from engines.data.read.chat import RenderedConversation
from engines.data.read.examples import Pair
from engines.trainers.supervised.preference import PolicyPairs, RewardPairs
from engines.training.spec import POLICY, REFERENCE, REWARD, ModelSource, RoleName, RoleSpec

VOCAB_SIZE, MAX_TOKENS, LR = 512, 256, 1e-4
MICRO_BATCH_TOKENS = 2_048
PAIRS_PER_STEP, STEPS_PER_TURN = 32, 4
GOAL = 1.5
Text = tuple[list[int], list[int], list[int]]
"""Prompt, chosen answer, rejected answer."""


def draw_pairs(num: int) -> list[Text]:
    """Token ids, without end tokens."""
    draw = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(draw.randint(low, high))]

    return [(tokens(16, 96), tokens(16, 128), tokens(16, 128)) for _ in range(num)]


def as_pair(index: int, text: Text, *, last_only: bool) -> Pair:
    """As the data stages hand it on; both trainers of the peer end an answer by the end token."""

    def side(answer: Sequence[int]) -> RenderedConversation:
        ids = (*text[0], *answer, EOS_TOKEN_ID)
        first = len(ids) - 1 if last_only else len(text[0])
        return RenderedConversation(ids, tuple(int(t >= first) for t in range(len(ids))))

    return Pair(index, side(text[1]), side(text[2]), 0.0, "drawn")


def one_rank(hf_dir: Path, roles: dict[RoleName, RoleSpec]) -> WorkerGroup:
    """The ranks of a stage of one process."""
    spec = WorkerSpec(
        roles=roles, serving_dir=hf_dir, rollout=None, temperature=1.0, platform="cpu", seed=0
    )
    worker = ModelWorker(spec)
    worker.initialize()
    return InProcessGroup(worker)


class Ours:
    """The training set and the rank of a stage, called as the trainer calls them."""

    def __init__(self, workers: WorkerGroup, pairs: PolicyPairs | RewardPairs, num: int) -> None:
        self._workers, self._pairs, self._num = workers, pairs, num

    def turn(self) -> float:
        """Pairs per second."""
        start = time.perf_counter()
        for step in range(STEPS_PER_TURN):
            first = step * PAIRS_PER_STEP
            batch = self._pairs.batch([(first + i) % self._num for i in range(PAIRS_PER_STEP)])
            batch = self._pairs.complete(batch, self._workers)
            self._workers.run(ModelWorker.train, batch, self._pairs.loss_fn, self._pairs.role)
        return STEPS_PER_TURN * PAIRS_PER_STEP / (time.perf_counter() - start)


def dpo(hf_dir: Path, texts: list[Text]) -> Ours:
    """Policy and reference on one rank."""
    source = ModelSource(hf_dir)
    training = TrainingConfig(max_tokens_per_micro_batch=MICRO_BATCH_TOKENS)
    roles: dict[RoleName, RoleSpec] = {
        POLICY: RoleSpec(source, training, OptimizerConfig(lr=LR), total_num_steps=10_000),
        REFERENCE: RoleSpec(source, training),
    }
    pairs = [as_pair(i, text, last_only=False) for i, text in enumerate(texts)]
    config = PreferenceConfig(num_steps=1, batch_size_pairs=PAIRS_PER_STEP)
    return Ours(one_rank(hf_dir, roles), PolicyPairs(config, pairs, [], MAX_TOKENS), len(pairs))


def reward_model(hf_dir: Path, texts: list[Text]) -> Ours:
    """A model of one output."""
    role = RoleSpec(
        ModelSource(hf_dir),
        TrainingConfig(max_tokens_per_micro_batch=MICRO_BATCH_TOKENS),
        OptimizerConfig(lr=LR),
        model_type="value_model",
        total_num_steps=10_000,
    )
    pairs = [as_pair(i, text, last_only=True) for i, text in enumerate(texts)]
    config = RewardTrainingConfig(num_steps=1, batch_size_pairs=PAIRS_PER_STEP)
    sets = RewardPairs(config, RewardModelOptions(), pairs, [])
    return Ours(one_rank(hf_dir, {REWARD: role}), sets, len(pairs))


def main() -> None:
    """Print pairs per second of both trainers, and the ratios."""
    options = arguments(__doc__ or "", peer=True)
    print(machine())
    texts = draw_pairs((STEPS_PER_TURN + 1) * PAIRS_PER_STEP)
    words = [[" ".join(map(word, part)) for part in text] for text in texts]
    for task, make in (("dpo", dpo), ("reward_model", reward_model)):
        with tempfile.TemporaryDirectory() as temporary:
            hf_dir, rows = Path(temporary) / "model", Path(temporary) / "rows.json"
            num_parameters = write_model(
                hf_dir, vocab_size=VOCAB_SIZE, intermediate_size=384, max_length=MAX_TOKENS,
                never_stops=False,
            )  # fmt: skip
            rows.write_text(json.dumps(words))
            ours = make(hf_dir, texts)
            with Peer(options.peer_python, "trl_peer.py", options.threads, deadline_s=600) as trl:
                request = {"task": task, "model": str(hf_dir), "rows": str(rows), "lr": LR}
                request |= {"pairs_per_step": PAIRS_PER_STEP, "steps": STEPS_PER_TURN, "seed": 0}

                def ask(size: int, trl: Peer = trl, request: dict = request) -> float:
                    return trl.ask(**request, pairs_per_pass=size)["pairs_per_s"]

                got = take_turns(
                    {
                        "ours": ours.turn,
                        **{f"TRL, {n} pairs a pass": lambda n=n: ask(n) for n in (8, 16, 32)},
                    },
                    options.repeats,
                )
        print(f"{task}, {num_parameters / 1e6:.2f} M parameters, {options.threads} thread(s)")
        for name, measured in got.items():
            print(f"  {name}: {measured.text('pairs/s')}")
        fastest = max((name for name in got if name != "ours"), key=lambda name: got[name].median)
        ratio = turn_by_turn(got["ours"], got[fastest])
        print(ratio_line(f"ours / {fastest}", ratio, GOAL))


if __name__ == "__main__":
    main()
