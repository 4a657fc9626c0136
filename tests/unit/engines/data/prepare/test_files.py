"""Which files a source means."""

import gzip
import json
import re
from pathlib import Path

import loaded_rows
import pytest

from engines.config.data import SourceConfig
from engines.data.prepare.files import resolve_source
from engines.data.prepare.readers import RawRow, read_file
from engines.data.prepare.sources import RL_ROWS, first_usable_row
from infra.errors import ConfigError


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}", encoding="utf-8")
    return root


def chosen(root: Path, subset: str | None = None, default: str | None = None, **more: str):
    source = SourceConfig.model_validate({"path": str(root), "subset": subset, **more})
    found = resolve_source(source, "data.rl.0", default)
    return [path.relative_to(root).as_posix() for path in found.files]


def test_a_directory_without_split_names_is_read_whole(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.parquet", "sub/c.json", "README.md", ".cache/x.jsonl")
    assert chosen(tmp_path) == ["a.parquet", "b.jsonl", "sub/c.json"]


def test_only_the_split_asked_for_is_read(tmp_path: Path) -> None:
    make(tmp_path, "data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet")
    make(tmp_path, "data/test-00000-of-00001.parquet")
    assert chosen(tmp_path, split="test") == ["data/test-00000-of-00001.parquet"]
    assert chosen(tmp_path) == [f"data/train-0000{i}-of-00002.parquet" for i in (0, 1)]
    with pytest.raises(ConfigError, match=r"data\.rl\.0\.split: got 'validation'; no file under"):
        chosen(tmp_path, split="validation")


def test_packed_files_are_read_once(tmp_path: Path) -> None:
    make(tmp_path, "a/train.jsonl.gz", "a/test.jsonl.gz", "b/train.jsonl", "b/train.jsonl.gz")
    make(tmp_path, "b/train.tar.gz")
    assert chosen(tmp_path / "a") == ["train.jsonl.gz"]
    assert chosen(tmp_path / "b") == ["train.jsonl"]
    source = SourceConfig(path=str(tmp_path / "a" / "train.jsonl.gz"))
    assert resolve_source(source, "data.rl.0", None).files == (Path(source.path),)


def test_a_split_of_two_words(tmp_path: Path) -> None:
    """The files of HuggingFaceH4/ultrafeedback_binarized."""
    names = [
        f"data/{split}_{part}-0.parquet" for split in ("train", "test") for part in ("prefs", "sft")
    ]
    make(tmp_path, *names)
    assert chosen(tmp_path, split="train_prefs") == ["data/train_prefs-0.parquet"]
    assert chosen(tmp_path, split="test_sft") == ["data/test_sft-0.parquet"]
    with pytest.raises(ConfigError, match="no file under .* is named after it"):
        chosen(tmp_path, split="rain_prefs")


def test_split_folders(tmp_path: Path) -> None:
    make(tmp_path, "train/algebra/1.json", "train/algebra/2.json", "test/algebra/1.json")
    assert chosen(tmp_path) == ["train/algebra/1.json", "train/algebra/2.json"]


def test_test_rows_never_slip_into_training(tmp_path: Path) -> None:
    make(tmp_path, "rows.jsonl", "test.jsonl")
    with pytest.raises(ConfigError, match="no file under .* is named after it"):
        chosen(tmp_path)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Train.jsonl", "Test.jsonl"),
        ("TRAIN/a.jsonl", "TEST/a.jsonl"),
        ("training.jsonl", "testing.jsonl"),
        ("train2016.jsonl", "test2016.jsonl"),
        ("trainset.jsonl", "testset.jsonl"),
        ("train-set.jsonl", "test_set.jsonl"),
        ("gsm_TrainSet1.jsonl", "gsm_TestSet1.jsonl"),
        ("quizTrain.jsonl", "quizTest.jsonl"),
        ("2016train.jsonl", "2016test.jsonl"),
        ("train 1.jsonl", "test 1.jsonl"),
        ("train(1).jsonl", "test(1).jsonl"),
        ("train.part1.JSONL", "test.part1.JSONL"),
    ],
)
def test_a_split_is_told_by_its_word_however_it_is_written(
    tmp_path: Path, train: str, test: str
) -> None:
    make(tmp_path, train, test)
    assert chosen(tmp_path) == [train]
    assert chosen(tmp_path, split="test") == [test]
    with pytest.raises(ConfigError, match="got 'validation'; no file under"):
        chosen(tmp_path, split="validation")


def test_evaluation_is_a_split(tmp_path: Path) -> None:
    make(tmp_path, "evaluation.jsonl", "rows.jsonl")
    with pytest.raises(ConfigError, match="got 'train'; no file under"):
        chosen(tmp_path)


@pytest.mark.parametrize("names", [("mytrain.jsonl", "mytest.jsonl"), ("a.jsonl", "testdata.csv")])
def test_words_that_may_mean_a_split_are_not_read_as_one(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    make(tmp_path, *names)
    for split in ("train", "test"):
        with pytest.raises(ConfigError) as error:
            chosen(tmp_path, split=split)
        said = str(error.value)
        assert said.startswith(f"data.rl.0.split: got {split!r}; ")
        assert names[1] in said
        assert "set it to a whole word of the names" in said
    assert chosen(tmp_path, split=names[1].partition(".")[0]) == [names[1]]


def test_words_that_hold_a_split_and_mean_another_thing(tmp_path: Path) -> None:
    make(tmp_path, "contests-0.jsonl", "latest/a.jsonl", "retrieval.jsonl", "interval.jsonl")
    assert len(chosen(tmp_path)) == 4


@pytest.mark.parametrize(
    "name",
    [
        "train-1.jsonl.zst",
        "train-1.ndjson",
        "train-1.JSONL.BZ2",
        "train-1.arrow",
        "train-1.csv.zip",
    ],
)
def test_a_part_that_cannot_be_read_is_not_left_out_in_silence(tmp_path: Path, name: str) -> None:
    make(tmp_path, "train-0.jsonl", name, "test.jsonl")
    with pytest.raises(ConfigError) as error:
        chosen(tmp_path)
    assert str(error.value).startswith(
        f"data.rl.0.path: cannot read {name}, which lies beside train-0.jsonl; need .parquet, "
    )
    assert chosen(tmp_path, split="test") == ["test.jsonl"]
    (tmp_path / "train-0.jsonl").unlink()
    with pytest.raises(ConfigError, match=re.escape(f"cannot read {name}; need")):
        chosen(tmp_path)


def test_suffixes_in_capitals_are_read(tmp_path: Path) -> None:
    make(tmp_path, "train-0.jsonl", "train-1.JSONL", "train-2.Json")
    assert len(chosen(tmp_path)) == 3
    (tmp_path / "train-3.JSONL.GZ").write_bytes(gzip.compress(b'{"a": 1}'))
    files = resolve_source(SourceConfig(path=str(tmp_path)), "data.rl.0", None).files
    assert [len(list(read_file(path))) for path in files] == [1, 1, 1, 1]
    table = tmp_path / "train.CSV"
    table.write_text("a,b\n1,2\n", encoding="utf-8")
    assert [row.columns for row in read_file(table) if isinstance(row, RawRow)] == [
        {"a": "1", "b": "2"}
    ]


def test_what_packs_a_file_that_is_there_is_a_copy(tmp_path: Path) -> None:
    make(tmp_path, "train.jsonl", "train.jsonl.zst", "train.json.ZIP", "train.json")
    assert chosen(tmp_path) == ["train.json", "train.jsonl"]


def test_files_of_no_split_beside_a_split_are_named(tmp_path: Path) -> None:
    make(tmp_path, "train-0.jsonl", "more.jsonl", "test.jsonl", "extra.ndjson", "train.csv")
    found = resolve_source(SourceConfig(path=str(tmp_path)), "data.rl.0", None)
    assert [path.name for path in found.files] == ["train-0.jsonl"]
    assert found.passed_over == ("extra.ndjson", "more.jsonl", "train.csv")


def test_a_report_names_the_files_that_were_passed_over(tmp_path: Path) -> None:
    row = {"prompt": "q", "reward_model": {"ground_truth": "1"}}
    for name in ("train.jsonl", "more.jsonl"):
        (tmp_path / name).write_text(json.dumps(row), encoding="utf-8")
    loaded = loaded_rows.load("rl", SourceConfig(path=str(tmp_path), format="rows"))
    assert loaded.reports[0].passed_over == ("more.jsonl",)


def test_subsets(tmp_path: Path) -> None:
    make(tmp_path, "main/train.parquet", "socratic/train.parquet")
    assert chosen(tmp_path) == ["main/train.parquet", "socratic/train.parquet"]
    assert chosen(tmp_path, default="main") == ["main/train.parquet"]
    assert chosen(tmp_path, subset="socratic", default="main") == ["socratic/train.parquet"]
    with pytest.raises(ConfigError, match=r"data\.rl\.0\.subset: no \.parquet"):
        chosen(tmp_path, subset="other")


def test_absent_file_names_the_directory_and_what_is_similar(tmp_path: Path) -> None:
    make(tmp_path, "train.jsonl")
    with pytest.raises(ConfigError) as error:
        resolve_source(SourceConfig(path=str(tmp_path / "trains.jsonl")), "data.sft.1", None)
    assert str(error.value) == (
        f"data.sft.1.path: {tmp_path}/trains.jsonl does not exist (cwd is {Path.cwd()}; "
        "1 similar: train.jsonl)"
    )


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    make(tmp_path, "train.txt")
    said = r"train\.txt'; need a \.parquet, \.json, \.jsonl, \.csv, \.tsv file; write one"
    with pytest.raises(ConfigError, match=said):
        chosen(tmp_path / "train.txt")


def test_tables_of_text_are_read_where_nothing_has_types(tmp_path: Path) -> None:
    make(tmp_path, "a/train.csv", "a/test.tsv", "b/train.csv", "b/train.parquet")
    make(tmp_path, "a/dataset_infos.json", "b/dataset_info.json")
    assert chosen(tmp_path / "a") == ["train.csv"]
    assert chosen(tmp_path / "a", split="test") == ["test.tsv"]
    assert chosen(tmp_path / "b") == ["train.parquet"]


def test_the_split_is_chosen_before_the_kind_of_file(tmp_path: Path) -> None:
    make(tmp_path, "train.csv", "test.jsonl", "validation.tsv")
    assert chosen(tmp_path) == ["train.csv"]
    assert chosen(tmp_path, split="test") == ["test.jsonl"]
    assert chosen(tmp_path, split="validation") == ["validation.tsv"]
    with pytest.raises(ConfigError) as error:
        chosen(tmp_path, split="dev")
    assert str(error.value).endswith("named after it; files: test.jsonl, train.csv, validation.tsv")


@pytest.mark.parametrize("name", ["dataset-metadata.json", "datapackage.json"])
def test_what_describes_tables_does_not_hide_them(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, "a.csv", "b.csv")
    assert chosen(tmp_path) == ["a.csv", "b.csv"]


def test_tables_that_are_passed_over_are_named(tmp_path: Path) -> None:
    make(tmp_path, *(f"{name}.csv" for name in "fedcba"), "about.json", "deep/train.csv")
    source = SourceConfig(path=str(tmp_path))
    others = (*(f"{name}.csv" for name in "abc"), "about.json", *(f"{x}.csv" for x in "def"))
    found = resolve_source(source, "data.rl.0", None)
    assert found.files == (tmp_path / "deep" / "train.csv",)
    assert sorted(found.passed_over) == sorted(others)
    (tmp_path / "deep" / "train.csv").unlink()
    found = resolve_source(source, "data.rl.0", None)
    assert found.files == (tmp_path / "about.json",)
    assert found.passed_over == tuple(f"{name}.csv" for name in "abcdef")
    (tmp_path / "about.json").write_text('{"title": "Sums"}')
    said = (
        "columns{}: title; not read beside it: a.csv, b.csv, c.csv, d.csv, e.csv and 1 more (to "
        "read one, name it as the path)"
    )
    named = source.model_copy(update={"format": "columns"})
    for given, of in ((source, " of about.json"), (named, "")):
        for read in (
            lambda given=given: loaded_rows.load("rl", given),
            lambda given=given: first_usable_row(given, "data.rl.0", RL_ROWS),
        ):
            with pytest.raises(ConfigError, match=re.escape(said.format(of))):
                read()


def test_a_hub_id_without_its_commit_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.rl\.0\.path: some-owner/some-data does not exist"
    ):
        resolve_source(SourceConfig(path="some-owner/some-data"), "data.rl.0", None)


def test_a_hub_id_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = SourceConfig(path="some-owner/some-data", revision="c" * 40)
    with pytest.raises(ConfigError, match=r"data\.rl\.0\.path: some-owner/some-data is no path"):
        resolve_source(source, "data.rl.0", None)


def test_a_downloaded_hub_data_set_is_found_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = "c" * 40
    root = tmp_path / "datasets--owner--name"
    make(root / "snapshots" / commit, "main/train-00000-of-00001.parquet", "main/test.parquet")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = SourceConfig(path="owner/name", revision=commit)
    found = resolve_source(source, "data.rl.0", "main")
    assert [path.name for path in found.files] == ["train-00000-of-00001.parquet"]
    assert found.revision == commit
