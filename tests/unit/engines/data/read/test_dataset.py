"""The dataset artifact: deterministic, disjoint, complete; built without torch."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config.data import ArithmeticConfig, DataConfig, SourceConfig
from engines.config.model import ModelConfig
from engines.data.order import permutation
from engines.data.prepare import stored_rows
from engines.data.prepare.dataset import build_dataset
from engines.data.read.dataset import load_dataset
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

RANDOM = ModelConfig(init="random", max_length=32)
PRETRAINED = ModelConfig(path="/nowhere")
ARITHMETIC = DataConfig(arithmetic=ArithmeticConfig(num_sft=50, num_rl=40, num_eval=30))


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def sources(directory: Path, evaluation: list[str], **data: Any) -> DataConfig:
    """Files with RL prompts r0 r1, conversations s0 s1, and the given evaluation prompts."""

    def write(name: str, rows: list[dict[str, Any]], layout: str) -> tuple[SourceConfig, ...]:
        path = directory / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return (SourceConfig(path=str(path), format=layout),)

    def rl(prompts: list[str]) -> list[dict[str, Any]]:
        answer = {"style": "rule", "ground_truth": "z"}
        return [{"prompt": prompt, "reward_model": answer} for prompt in prompts]

    chats = [
        [{"role": "user", "content": s}, {"role": "assistant", "content": "y"}]
        for s in ("s0", "s1")
    ]
    return DataConfig(
        sft=write("sft.jsonl", [{"messages": chat} for chat in chats], "messages"),
        rl=write("rl.jsonl", rl(["r0", "r1"]), "rows"),
        evaluation=write("eval.jsonl", rl(evaluation), "rows"),
        **data,
    )


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_dataset(ARITHMETIC, RANDOM, seed, tmp_path / name)
    first, again, other = (digests(tmp_path / name) for name in "abc")
    assert first == again
    assert set(first) == {
        "sft.parquet",
        "rl.parquet",
        "eval.parquet",
        "summary.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/chat_template.jinja",
    }
    assert {name for name in first if first[name] != other[name]} == {
        "sft.parquet",
        "rl.parquet",
        "eval.parquet",
    }


def test_a_changed_row_changes_the_artifact(tmp_path: Path) -> None:
    data = sources(tmp_path, ["e0", "e1"])
    build_dataset(data, PRETRAINED, 0, tmp_path / "a")
    data = sources(tmp_path, ["e0", "e2"])
    build_dataset(data, PRETRAINED, 0, tmp_path / "b")
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert {name for name in first if first[name] != second[name]} == {"eval.parquet"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    prompts=st.lists(st.sampled_from(["r0", " r0", "r1", "s0", None]), min_size=1, max_size=12),
    limit=st.none() | st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_rows_on_disk_are_those_of_plain_lists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[str | None],
    limit: int | None,
    seed: int,
) -> None:
    """Bad rows, repeated ones, a limit and an overlap, against the same in a few lines."""
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", 3)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    answer = {"style": "rule", "ground_truth": "z"}
    lines = [json.dumps({"prompt": each, "reward_model": answer}) for each in prompts]
    (tmp_path / "repeated.jsonl").write_text("\n".join(lines), encoding="utf-8")
    repeated = SourceConfig(
        path=str(tmp_path / "repeated.jsonl"), format="dapo_math_17k", limit=limit
    )
    data = sources(tmp_path, ["r0 ", "e0"], allow_overlap=True, on_bad_row="drop")
    data = data.model_copy(update={"rl": (*data.rl, repeated)})

    distinct = list(dict.fromkeys(each for each in prompts if each is not None))
    if not distinct:
        with pytest.raises(ConfigError, match=f"0 rows of {len(prompts)} are usable"):
            build_dataset(data, PRETRAINED, seed, tmp_path / "out")
        return
    kept = distinct
    if limit is not None and limit < len(distinct):
        kept = [distinct[place] for place in permutation(len(distinct), seed)[:limit]]
    summary = build_dataset(data, PRETRAINED, seed, tmp_path / "out")
    found = [row.prompt[0].content for row in load_dataset(tmp_path / "out").rl_rows()]
    assert found == ["r0", "r1", *kept]
    assert summary.rl.num_distinct_prompts == len({each.strip() for each in found})
    assert summary.num_overlapping == 1
    report = summary.rl.sources[1]
    usable = [each for each in prompts if each is not None]
    assert (report.num_read, report.num_rows) == (len(prompts), len(kept))
    assert report.num_duplicates == len(usable) - len(distinct)
    assert report.num_over_limit == len(distinct) - len(kept)
    assert sum(report.num_bad.values()) == len(prompts) - len(usable)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"out"}


def test_what_was_built_is_loaded(tmp_path: Path) -> None:
    summary = build_dataset(ARITHMETIC, RANDOM, 0, tmp_path)
    dataset = load_dataset(tmp_path)
    counts = [
        len(rows) for rows in (dataset.sft_rows(), dataset.rl_rows(), dataset.evaluation_rows())
    ]
    assert counts == [50, 40, 30]
    assert [s.num_rows for s in (summary.sft, summary.rl, summary.evaluation)] == counts
    assert dataset.summary()["rl"]["data_sources"] == {"arithmetic/add": 40}
    assert dataset.tokenizer_dir is not None
    tokenizer = DirectoryTokenizer.load(dataset.tokenizer_dir)
    texts = [m.content for row in dataset.evaluation_rows() for m in row.prompt]
    assert "<|unk|>" not in "".join(tokenizer.decode(tokenizer.encode(text)) for text in texts)
    assert summary.vocab_size == len(tokenizer)


def test_a_pretrained_model_gets_no_tokenizer(tmp_path: Path) -> None:
    summary = build_dataset(sources(tmp_path, ["e0"]), PRETRAINED, 0, tmp_path / "out")
    assert load_dataset(tmp_path / "out").tokenizer_dir is None
    assert summary.rl.num_overlong is None


def test_evaluation_prompts_that_occur_in_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_dataset(sources(tmp_path, ["e0", " r1\n", "s0"]), PRETRAINED, 0, tmp_path / "out")
    assert str(error.value) == (
        "data.evaluation: 2 eval prompts occur in train (first: row 1 = rl row 1); remove them, or "
        "set data.allow_overlap"
    )
    data = sources(tmp_path, ["e0", "r1", "s0"], allow_overlap=True)
    assert build_dataset(data, PRETRAINED, 0, tmp_path / "out").num_overlapping == 2


def test_overlong_prompts_stop_the_first_stage(tmp_path: Path) -> None:
    data = ARITHMETIC.model_copy(update={"max_prompt_length": 7})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length: 40 of 40 prompts exceed 7"):
        build_dataset(data, RANDOM, 0, tmp_path)


def test_overlong_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    data = sources(tmp_path, ["e0", "e" * 40], max_prompt_length=8, on_overlong="drop")
    summary = build_dataset(data, RANDOM, 0, tmp_path / "out")
    assert (summary.evaluation.num_rows, summary.evaluation.num_overlong) == (1, 1)
    assert len(load_dataset(tmp_path / "out").evaluation_rows()) == 1


def test_nothing_in_the_files_names_the_place(tmp_path: Path) -> None:
    build_dataset(sources(tmp_path, ["e0"]), RANDOM, 0, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.*"):
        assert str(tmp_path).encode() not in path.read_bytes()


def test_a_directory_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no sft\.parquet, rl\.parquet, eval\.parquet, summ"):
        load_dataset(tmp_path)


def test_data_and_rewards_import_without_torch() -> None:
    program = (
        "import sys, pkgutil, importlib\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import engines.data, engines.rewards\n"
        "for package in (engines.data, engines.rewards):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
