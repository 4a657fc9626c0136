"""The rows that self-play asks about: of the files of the data, and those that make no pair."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from loaded_rows import write_rows

from engines.config.sections import SelfPlayConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.data.read.dataset import RL_FILE, SFT_FILE, Dataset
from engines.data.read.row_files import RL_FORMAT, SFT_FORMAT, RowFile
from engines.data.read.rows import Image, Message, RewardModel, RLRow, SFTRow, ToolCall
from engines.jobs.self_play import asked_rows
from infra.errors import ConfigError

NUM_ROWS = 150


def prompt(number: int) -> RLRow:
    return RLRow("s", (Message("user", f"{number}?"),), "", RewardModel("rule", str(number)))


def conversation(number: int) -> SFTRow:
    return SFTRow((*prompt(number).prompt, Message("assistant", str(number))), "s")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    write_rows(tmp_path / RL_FILE, RL_FORMAT, map(prompt, range(NUM_ROWS)))
    write_rows(tmp_path / SFT_FILE, SFT_FORMAT, map(conversation, range(NUM_ROWS)))
    return Dataset(tmp_path)


def asked(dataset: Dataset, iteration: int = 1, **section: Any) -> list[RLRow]:
    config = SelfPlayStageConfig.model_construct(
        iteration=iteration, self_play=SelfPlayConfig(**section)
    )
    with ExitStack() as stack:
        rows = asked_rows(config, dataset, 7, stack, dataset.directory)
        assert len(rows) == len(list(rows))
        return [rows[place] for place in range(len(rows))]


@pytest.mark.parametrize("source", ["spin", "best_worst"])
def test_rows_come_from_the_file_when_they_are_asked_for(
    dataset: Dataset, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(dataset, source=source) == [*map(prompt, range(NUM_ROWS))]
    first, second = (asked(dataset, each, source=source, num_prompts=100) for each in (1, 2))
    assert sorted(row.prompt[0].content for row in [*first, *second[:50]]) == sorted(
        f"{number}?" for number in range(NUM_ROWS)
    )
    parsed: list[int] = []
    whole = RowFile.parse
    monkeypatch.setattr(
        RowFile, "parse", lambda file, *given: (parsed.append(1), whole(file, *given))[1]
    )
    config = SelfPlayStageConfig.model_construct(
        iteration=1, self_play=SelfPlayConfig.model_validate({"source": source})
    )
    with ExitStack() as stack:
        rows = asked_rows(config, dataset, 7, stack, dataset.directory)
        assert parsed == []
        assert rows[149] == prompt(149)
    assert parsed == [1]


def test_an_answer_that_calls_tools_is_set_beside_no_text(dataset: Dataset) -> None:
    calls = Message("assistant", "", (ToolCall("f"),))
    turns = (*prompt(2).prompt, calls, Message("tool", "3"), Message("assistant", "3"))
    write_rows(dataset.directory / SFT_FILE, SFT_FORMAT, [conversation(1), SFTRow(turns, "s")])
    with pytest.raises(ConfigError) as refused:
        asked(dataset)
    assert str(refused.value).startswith("data.sft: row 1 of the split calls tools in its first ")


def test_rows_that_show_images_make_no_pairs(dataset: Dataset) -> None:
    shows = Message("user", "<image>?", images=(Image("a" * 64),))
    row = RLRow("s", (shows,), "", RewardModel("rule", "2"))
    write_rows(dataset.directory / RL_FILE, RL_FORMAT, [prompt(1), prompt(2), row])
    with pytest.raises(ConfigError) as refused:
        asked(dataset, source="best_worst")
    assert str(refused.value) == (
        "preference.self_play.source: got best_worst, which asks about rows of data.rl; row 2 of "
        "the split shows images, which pairs do not hold; need rows of text; set it to spin, or "
        "leave out the source"
    )
    assert len(asked(dataset)) == NUM_ROWS
