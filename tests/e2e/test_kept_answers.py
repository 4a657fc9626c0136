"""Answers of an evaluation, found again by another that judges them otherwise."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_bench import HOLDER, JOB_DEADLINE_S, Bench, Job, journal_of
from tiny_stages import DATA, EVALUATE, EVALUATION, MODEL

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from infra.store.artifacts import external_artifact
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage

SHAPE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)
NUM_ANSWERS = 4 * (1 + 4)
"""Greedy and sampled, to every problem of the tiny data."""


@dataclass(frozen=True)
class Measured:
    """A model that was evaluated once."""

    bench: Bench
    inputs: Mapping[str, Artifact]
    record: CommitRecord

    def again(self, **changes: Any) -> tuple[CommitRecord, int]:
        """Evaluate with another configuration: the commit, and how many answers were found."""
        spec = self.bench.spec("evaluate", {**EVALUATE, **changes}, self.inputs)
        return self.bench.run(spec), found_by(spec)

    @property
    def answers(self) -> list[Path]:
        """The artifacts in the store."""
        return sorted((self.bench.root / "store" / "artifacts" / "answers").iterdir())


def found_by(spec: StageSpec) -> int:
    said = [record.message for record in journal_of(spec) if record.message]
    counts = [int(text.split()[0]) for text in said if text.endswith(" answers were there already")]
    return sum(counts)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    root = tmp_path_factory.mktemp("answers")
    bench = Bench(root)
    dataset = bench.run(bench.spec("preprocess", {"data": DATA, "model": MODEL}, {})).artifact
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["0123456789+= "], root / "tokenizer", max_length=64
    )
    create_random_model(SHAPE, tokenizer, 64, 0, root / "model")
    inputs = {"dataset": dataset, "model": external_artifact(root / "model")}
    return Measured(bench, inputs, bench.run(bench.spec("evaluate", EVALUATE, inputs)))


def rows_of(measured: Measured, record: CommitRecord) -> list[dict[str, Any]]:
    directory = open_storage(str(measured.bench.root / "store")).local_copy(record.artifact)
    return pq.read_table(directory / "rows.parquet").to_pylist()


def texts(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [[row["greedy"]["text"], *(each["text"] for each in row["samples"])] for row in rows]


def test_another_reward_and_other_k_judge_the_same_answers(measured: Measured) -> None:
    first = rows_of(measured, measured.record)
    assert sum(map(len, texts(first))) == NUM_ANSWERS
    evaluation = {**EVALUATION, "pass_at": [2], "confidence": 0.5}
    record, num_found = measured.again(reward={"function": "math"}, evaluation=evaluation)
    assert num_found == NUM_ANSWERS
    assert texts(rows_of(measured, record)) == texts(first)
    assert "pass@2" in record.metrics


def test_an_evaluation_that_is_asked_for_again_samples_again(measured: Measured) -> None:
    """A forced generation measures; its answers are the old ones, for they repeat."""
    spec = measured.bench.spec("evaluate", EVALUATE, measured.inputs)
    store = open_storage(spec.store_uri)
    number = len(store.attempts.entries(spec.fingerprint))
    store.attempts.hold(spec.fingerprint, HOLDER, number, force="again")
    forced = spec.model_copy(update={"attempt": number})
    store.channel(spec.fingerprint).write_specification(forced)
    code, output = Job(forced.job_argv, measured.bench.environment).ended(JOB_DEADLINE_S)
    assert code == 0, output
    assert "answers were there already" not in output
    record = store.lookup(spec.fingerprint, "again")
    assert record is not None
    assert record.artifact.digest == measured.record.artifact.digest


@pytest.mark.parametrize(
    ("changes", "num_greedy"),
    [
        pytest.param({"evaluation": {**EVALUATION, "temperature": 0.5}}, 4, id="sampling"),
        pytest.param({"rollout": {"dtype": "bfloat16"}}, 0, id="numerics"),
    ],
)
def test_what_changes_an_answer_has_it_sampled(
    measured: Measured, changes: Mapping[str, Any], num_greedy: int
) -> None:
    assert measured.again(**changes)[1] == num_greedy


def test_answers_that_are_gone_or_damaged_are_sampled_and_come_out_the_same(
    measured: Measured,
) -> None:
    for number, path in enumerate(
        path for each in measured.answers for path in each.glob("*.par*")
    ):
        content = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        if number % 2:
            path.unlink()
    record, num_found = measured.again(reward={"function": "exact", "timeout_s": 9.0})
    assert num_found == 0
    rows, first = rows_of(measured, record), rows_of(measured, measured.record)
    assert json.dumps(rows) == json.dumps(first)
