"""Answers of an evaluation, found again by another that judges them otherwise."""

import json
import shutil
import signal
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
from infra.identity.imported_code import script_artifact
from infra.store.artifacts import MANIFEST_NAME, external_artifact
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


def test_an_edited_reward_file_judges_the_same_answers_anew(
    measured: Measured, tmp_path: Path
) -> None:
    script = tmp_path / "reward.py"
    found: list[list[dict[str, Any]]] = []
    for score in ("0.25", "0.75"):
        script.write_text(f"def compute_score(*_, **__):\n    return {score}\n")
        inputs = {**measured.inputs, "reward": script_artifact(script, "rl.reward.function")}
        reward = {"function": f"{script}:compute_score"}
        spec = measured.bench.spec("evaluate", {**EVALUATE, "reward": reward}, inputs)
        record = measured.bench.run(spec)
        assert found_by(spec) == NUM_ANSWERS
        assert record.metrics["reward/mean"] == float(score)
        found.append(rows_of(measured, record))
    assert texts(found[0]) == texts(found[1]) == texts(rows_of(measured, measured.record))


@pytest.mark.parametrize(
    ("fault", "num_found"),
    [
        # The commit of the greedy answers is the first, that of the sampled ones the second.
        pytest.param("storage.before_commit=kill@1", 0, id="with the greedy ones"),
        pytest.param("storage.before_commit=kill@2", 4, id="with the sampled ones"),
        pytest.param("storage.before_commit=kill@3", NUM_ANSWERS, id="with its own output"),
    ],
)
def test_one_that_was_killed_goes_on_with_what_it_kept(
    measured: Measured, tmp_path: Path, fault: str, num_found: int
) -> None:
    bench = Bench(tmp_path, {"RLHF_FAULTS": fault})
    inputs = {"dataset": copied(measured, bench, "dataset"), "model": measured.inputs["model"]}
    killed = bench.start(bench.spec("evaluate", EVALUATE, inputs))
    assert killed.ended(JOB_DEADLINE_S)[0] == -signal.SIGKILL
    spec = bench.spec("evaluate", EVALUATE, inputs, attempt=1)
    record = Bench(tmp_path).run(spec)
    assert found_by(spec) == num_found
    assert record.artifact.digest == measured.record.artifact.digest


@pytest.mark.parametrize("fault", ["storage.before_publish=enospc", "storage.before_commit=eio"])
def test_store_failing_to_keep_answers_costs_one_log_line(
    measured: Measured, tmp_path: Path, fault: str
) -> None:
    bench = Bench(tmp_path, {"RLHF_FAULTS": fault})
    inputs = {"dataset": copied(measured, bench, "dataset"), "model": measured.inputs["model"]}
    spec = bench.spec("evaluate", EVALUATE, inputs)
    code, output = bench.start(spec).ended(JOB_DEADLINE_S)
    assert code == 0, output
    assert output.count("answers are not kept for another evaluation: [Errno ") == 1
    assert "Traceback" not in output
    record = open_storage(spec.store_uri).lookup(spec.fingerprint)
    assert record is not None
    assert record.artifact.digest == measured.record.artifact.digest


def copied(measured: Measured, bench: Bench, name: str) -> Artifact:
    """An input in the store of another bench."""
    artifact, store = measured.inputs[name], open_storage(str(bench.root / "store"))
    source = open_storage(str(measured.bench.root / "store")).local_copy(artifact)
    shutil.copytree(source, bench.root / name)
    (bench.root / name / MANIFEST_NAME).unlink()
    return store.publish(bench.root / name, artifact.kind)


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


def test_missing_or_damaged_answers_are_resampled_identically(
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
