"""The preprocess job reads the files that were planned: changed ones make no data set."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from engines.config.data import DataConfig, SourceConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.data.read.dataset import load_dataset
from engines.jobs import preprocess as job
from engines.jobs.preprocess import preprocess
from engines.jobs.process.runtime import JobContext
from engines.trainers.step_timer import PhaseClock
from infra.errors import ArtifactCorruptError, ConfigError
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage
from tasks.runner.run import stage_request


class Silent:
    """A heartbeat and a journal that keep nothing but what was logged."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def enter(self, phase: str, deadline_s: float) -> None:
        pass

    def progress(self, done: int, total: int, what: str) -> None:
        pass


def write(path: Path, *answers: str) -> None:
    path.parent.mkdir(exist_ok=True)
    turns = ({"role": "user", "content": "q"}, {"role": "assistant", "content": ""})
    rows = [{"messages": [turns[0], {**turns[1], "content": answer}]} for answer in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "train.jsonl"
    write(path, "as planned")
    return path


def planned(path: Path, directory: Path) -> JobContext[PreprocessStageConfig]:
    """The job of a stage whose source was digested."""
    config = PreprocessStageConfig(data=DataConfig(sft=(SourceConfig(path=str(path)),)))
    spec = StageSpec(
        stage="preprocess",
        job_module="engines.jobs.preprocess",
        fingerprint="ab" * 32,
        attempt=0,
        holder="test",
        config=config.model_dump(mode="json"),
        inputs=stage_request(config, 0).inputs,
        seed=0,
        store_uri=str(directory / "store"),
        runtime={},
    )
    silent: Any = Silent()
    attempt = directory / "attempt"
    (attempt / "output").mkdir(parents=True)
    storage = LocalStorage(directory / "store")
    return JobContext(
        spec, config, storage, silent, silent, PhaseClock(), attempt, directory, lambda: None
    )


@pytest.mark.parametrize("whole", [False, True])
def test_planned_files_make_a_data_set(file: Path, tmp_path: Path, whole: bool) -> None:
    context = planned(file.parent if whole else file, tmp_path)
    preprocess(context)
    [row] = load_dataset(context.output_dir).sft_rows()
    assert row.messages[-1].content == "as planned"


def test_files_that_are_passed_over_are_told(file: Path, tmp_path: Path) -> None:
    write(file.with_name("more.jsonl"), "more")
    context = planned(file.parent, tmp_path)
    preprocess(context)
    assert cast(Any, context.journal).said == ["data.sft.0: not read: more.jsonl"]


def test_a_file_that_was_changed_after_the_plan_is_refused(file: Path, tmp_path: Path) -> None:
    context = planned(file, tmp_path)
    write(file, "something else")
    with pytest.raises(ArtifactCorruptError, match=r"train\.jsonl changed after it was planned"):
        preprocess(context)
    assert list(context.output_dir.iterdir()) == []


def test_file_added_to_a_folder_after_the_plan_is_refused(file: Path, tmp_path: Path) -> None:
    context = planned(file.parent, tmp_path)
    write(file.with_name("train-1.jsonl"), "more")
    with pytest.raises(ArtifactCorruptError, match="data changed after it was planned"):
        preprocess(context)


def test_a_file_that_is_gone_is_refused(file: Path, tmp_path: Path) -> None:
    context = planned(file, tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"train\.jsonl does not exist"):
        preprocess(context)


@pytest.mark.parametrize("content", ['{"messages": ', None])
def test_a_file_that_is_changed_while_it_is_read_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """Also where what is read of it is no row: that is not what the user has to hear of."""
    context, build = planned(file, tmp_path), job.build_dataset

    def changed_meanwhile(*arguments: Any) -> Any:
        if content is None:
            write(file, "something else")
        else:
            file.write_text(content, encoding="utf-8")
        return build(*arguments)

    monkeypatch.setattr(job, "build_dataset", changed_meanwhile)
    with pytest.raises(ArtifactCorruptError, match="changed after it was planned"):
        preprocess(context)
