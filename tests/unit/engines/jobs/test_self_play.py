"""Self-play as a job, its engine told what to answer: the artifact, its counts, its memory."""

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loaded_rows import write_rows

from engines.config.model import TokenizerConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.data.prepare import stored_rows
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.data.read.chat import DEFAULT_CHAT_TEMPLATE
from engines.data.read.dataset import Dataset
from engines.data.read.examples import as_policy, read_pairs
from engines.data.read.row_files import (
    PREFERENCE_FORMAT,
    RL_FORMAT,
    SFT_FORMAT,
    RowFile,
)
from engines.data.read.rows import Message, PreferenceRow, RewardModel, RLRow, SFTRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import NothingToTrainOnError
from engines.jobs import self_play as job
from engines.rewards.base import Score
from engines.trainers.step_timer import PhaseClock
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError

CHATML_LIKE = DEFAULT_CHAT_TEMPLATE.replace("'<|end|>'", "'<|end|>\n'")
"""Writes a line break behind the end of an answer, which is never sampled."""
Answer = Callable[[RolloutRequest], Sequence[Sequence[int]]]


def conversation(question: str, answer: str = "1") -> SFTRow:
    return SFTRow((Message("user", question), Message("assistant", answer)), "s")


def prompt(question: str) -> RLRow:
    return RLRow("s", (Message("user", question),), "", RewardModel("rule", "1"))


class Lab:
    """A tokenizer and a data set, and the stage over them as often as a test asks for it.

    Args:
        directory: of its own.
        kind: of the tokenizer.
        template: of the tokenizer.
    """

    def __init__(self, directory: Path, kind: str, template: str = DEFAULT_CHAT_TEMPLATE) -> None:
        self.directory = directory
        config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300})
        made = directory / "hf"
        train_tokenizer(config, ["0123456789\n"], made, max_length=99, chat_template=template)
        (made / "config.json").write_text("{}", encoding="utf-8")
        self.tokenizer = DirectoryTokenizer.load(made)
        self.num_attempts = 0

    def write(self, *rows: SFTRow | RLRow) -> None:
        """The data set."""
        sft = [row for row in rows if isinstance(row, SFTRow)]
        rl = [row for row in rows if isinstance(row, RLRow)]
        write_rows(self.directory / "sft.parquet", SFT_FORMAT, sft)
        write_rows(self.directory / "rl.parquet", RL_FORMAT, rl)

    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        answer: Answer,
        *,
        max_length: int,
        max_new_tokens: int,
        **self_play: Any,
    ) -> tuple[dict[str, float], list[PreferenceRow], Path]:
        """An attempt: its metrics, its pairs and its directory."""
        self.num_attempts += 1
        attempt = self.directory / str(self.num_attempts)
        (attempt / "output").mkdir(parents=True)
        config = SelfPlayStageConfig.model_validate(
            {
                "iteration": 1,
                "max_length": max_length,
                "self_play": self_play,
                "sampling": {"max_new_tokens": max_new_tokens},
                "rollout": {},
                "reward": {"function": "exact"},
            }
        )
        context: Any = SimpleNamespace(
            config=config,
            spec=SimpleNamespace(seed=0, inputs={}),
            input=lambda _: self.directory,
            clock=PhaseClock(),
            heartbeat=SimpleNamespace(enter=lambda *_: None, tick=lambda: None),
            journal=SimpleNamespace(progress=lambda *_: None),
            attempt_dir=attempt,
            output_dir=attempt / "output",
        )
        scorer = SimpleNamespace(
            tokenizer=self.tokenizer,
            decode=lambda each: self.tokenizer.decode(
                each.token_ids.tolist(), skip_special_tokens=True
            ),
            judge=lambda _, completions, __: [
                [Score(float(place)) for place, _ in enumerate(each)] for each in completions
            ],
        )

        def generate(requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
            return [
                [
                    Completion(request.request_id, place, ids, [0.0] * len(ids), (), "stop")
                    for place, ids in enumerate(answer(request))
                ]
                for request in requests
            ]

        for name, stub in {
            "RewardScorer": lambda _: nullcontext(),
            "load_served": lambda _: SimpleNamespace(hf_dir=self.directory / "hf"),
            "load_dataset": Dataset,
            "serve": lambda *_: (SimpleNamespace(generate=generate), scorer),
            "KeptAnswers": lambda _, asks: asks,
        }.items():
            monkeypatch.setattr(job, name, stub)
        output = job.self_play(context)
        summary = json.loads((attempt / "output" / "summary.json").read_text("utf-8"))
        assert summary == output.metrics
        pairs = [*RowFile(attempt / "output" / "preference.parquet", PREFERENCE_FORMAT)]
        # Whoever trains on them takes every one.
        assert len(read_pairs(pairs, self.tokenizer, max_length, as_policy)) == len(pairs)
        return output.metrics, pairs, attempt


def test_answer_made_too_long_by_the_template_forms_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, "character", CHATML_LIKE)
    # Two tokens of the template; the second prompt leaves an answer no token too many.
    lab.write(conversation("0" * 15), conversation("0" * 16))
    whole, end = lab.tokenizer.encode("22222"), lab.tokenizer.eos_token_id
    metrics, pairs, _ = lab.run(
        monkeypatch, lambda _: [[*whole, end]], max_length=24, max_new_tokens=6
    )
    assert [len(pair.prompt[0].content) for pair in pairs] == [15]
    assert metrics == {
        "num_pairs": 1,
        "num_unpaired": 0,
        "num_overlong_pairs": 1,
        "num_overlong_prompts": 0,
    }


def test_answer_that_grows_on_retokenization_forms_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, "bpe")
    lab.write(conversation("012345"), conversation("67"))
    [stray], end = lab.tokenizer.encode("\u00e9")[:1], lab.tokenizer.eos_token_id
    metrics, pairs, _ = lab.run(
        monkeypatch, lambda _: [[stray, stray, end]], max_length=11, max_new_tokens=3
    )
    assert lab.tokenizer.decode([stray, stray]) == "\ufffd" * 2
    assert [pair.prompt[0].content for pair in pairs] == ["67"]
    assert (metrics["num_pairs"], metrics["num_overlong_pairs"]) == (1, 1)


def test_pairs_that_are_all_too_long_say_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, "character", CHATML_LIKE)
    lab.write(conversation("0" * 16))
    whole, end = lab.tokenizer.encode("22222"), lab.tokenizer.eos_token_id
    with pytest.raises(ConfigError) as refused:
        lab.run(monkeypatch, lambda _: [[*whole, end]], max_length=24, max_new_tokens=6)
    said = str(refused.value)
    assert said.startswith("model.max_length: got 24; each of the 1 pairs ")
    assert said.endswith("raise it, or lower preference.self_play.sampling.max_new_tokens")


def test_no_pair_at_all_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, "character")
    lab.write(conversation("00"))
    same = [*lab.tokenizer.encode("1"), lab.tokenizer.eos_token_id]
    with pytest.raises(NothingToTrainOnError, match="none of 1 prompts made a pair: every answer"):
        lab.run(monkeypatch, lambda _: [same], max_length=24, max_new_tokens=6)


def test_prompts_that_leave_no_room_are_skipped_in_self_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, "character")
    rows = [conversation("0" * n) for n in (8, 17, 16, 20)]
    lab.write(*rows)
    end = lab.tokenizer.eos_token_id
    asked: list[str] = []

    def answer(request: RolloutRequest) -> list[list[int]]:
        asked.append(request.request_id)
        return [[*lab.tokenizer.encode("2"), end]]

    metrics, pairs, _ = lab.run(monkeypatch, answer, max_length=24, max_new_tokens=6)
    assert [pair.prompt for pair in pairs] == [rows[0].prompt, rows[2].prompt]
    assert (metrics["num_pairs"], metrics["num_overlong_prompts"]) == (2, 2)
    # A row's answers do not hang on which others are left out.
    assert asked == ["self_play=1/prompt=0", "self_play=1/prompt=2"]
    with pytest.raises(ConfigError) as refused:
        lab.run(monkeypatch, answer, max_length=24, max_new_tokens=20)
    assert str(refused.value) == (
        "preference.self_play.sampling.max_new_tokens: got 20; 4 of 4 prompts leave less of a "
        "context of 24 tokens (the shortest, prompt 0, has 10); need at most 14; lower it, or "
        "leave such prompts out"
    )


def test_prompts_of_rl_rows_that_leave_no_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, "character")
    lab.write(prompt("0" * 8), prompt("0" * 17))
    with pytest.raises(ConfigError) as refused:
        lab.run(monkeypatch, lambda _: [], max_length=24, max_new_tokens=6, source="best_worst")
    assert str(refused.value) == (
        "preference.self_play.sampling.max_new_tokens: got 6; 1 of 2 prompts leave less of a "
        "context of 24 tokens (the longest, prompt 1, has 19); need at most 5; lower it, or "
        "leave such prompts out"
    )


@pytest.mark.parametrize("source", ["spin", "best_worst"])
def test_pairs_go_to_the_disk_as_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    num_rows, at_a_time = 60, 4
    monkeypatch.setattr(job, "PROMPTS_PER_CALL", at_a_time)
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", at_a_time)
    lab = Lab(tmp_path, "character")
    questions = [f"{number:02}" for number in range(num_rows)]
    lab.write(*map(conversation, questions), *map(prompt, questions))
    end, alive, asked = lab.tokenizer.eos_token_id, list[int](), count(1)

    def answer(request: RolloutRequest) -> list[list[int]]:
        if next(asked) == num_rows:  # a look takes a second: the last one would find most
            alive.append(sum(type(each) is PreferenceRow for each in gc.get_objects()))
        return [[*lab.tokenizer.encode(text), end] for text in ("23", "45")]

    gc.collect()
    _, pairs, first = lab.run(
        monkeypatch, answer, max_length=24, max_new_tokens=6, source=source, num_samples=2
    )
    assert [pair.prompt[0].content for pair in pairs] == questions
    [num_alive] = alive
    assert num_alive <= 3 * at_a_time
    # The bytes are those of all rows at once, and of any other attempt.
    whole = tmp_path / "whole.parquet"
    write_rows(whole, PREFERENCE_FORMAT, pairs)
    monkeypatch.setattr(job, "PROMPTS_PER_CALL", 256)
    *_, again = lab.run(
        monkeypatch, answer, max_length=24, max_new_tokens=6, source=source, num_samples=2
    )
    [written, repeated] = [each / "output" / "preference.parquet" for each in (first, again)]
    assert written.read_bytes() == whole.read_bytes() == repeated.read_bytes()
