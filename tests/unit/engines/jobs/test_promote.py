"""The decision of the job `promote`, from evaluations as they lie in a store."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store.canonical import canonical_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.promotion import Decision


class Bench:
    """A store, and evaluations of ten problems in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = LocalStorage(root / "store")

    def publish(self, kind: str, name: str) -> Artifact:
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        (directory / "name").write_text(name)
        return self.storage.publish(directory, kind)

    def evaluation(self, name: str, num_right: int, first: int = 0) -> Artifact:
        answers = [{"correct": place < num_right, "score": 0.0} for place in range(10)]
        rows = [
            {
                "index": first + place, "data_source": "sums", "prompt": f"{place}?",
                "ground_truth": str(place), "images": [],
                "greedy": each, "samples": [each],
            }
            for place, each in enumerate(answers)
        ]  # fmt: skip
        directory = self.root / name
        directory.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), directory / "rows.parquet")
        summary = {"metrics": {"accuracy": num_right / 10}}
        (directory / "summary.json").write_bytes(canonical_json(summary))
        return self.publish("evaluation", name)

    def run(self, gate: dict[str, Any], **inputs: Artifact) -> "subprocess.CompletedProcess[str]":
        spec = StageSpec(
            stage="promote", job_module="engines.jobs.promote", fingerprint="ab" * 32, attempt=0,
            holder="test", config={"promote": gate}, inputs=inputs, seed=0,
            store_uri=self.storage.uri,
        )  # fmt: skip
        self.storage.attempts.hold(spec.fingerprint, Holder(id="test", process="test"), 0)
        self.storage.channel(spec.fingerprint).write_specification(spec)
        return subprocess.run(
            [sys.executable, *spec.job_argv], capture_output=True, text=True, timeout=60
        )

    def decide(self, gate: dict[str, Any], **inputs: Artifact) -> tuple[Decision, dict[str, float]]:
        ended = self.run(gate, **inputs)
        assert ended.returncode == 0, ended.stderr
        record = self.storage.lookup("ab" * 32)
        assert record is not None
        return Decision.read(self.storage.local_copy(record.artifact)), record.metrics


@pytest.mark.parametrize(
    ("num_right", "before", "min_value", "alias", "why"),
    [
        # Six of six changed: 1/64 by chance. Five of five: 1/32, above 0.025.
        (9, 3, 0.5, "champion", "+0.6 over the incumbent {} on 10 problems, beyond the 0.4 of"),
        (9, 4, 0.5, "challenger", "+0.5 over the incumbent {} on 10 problems, not beyond the 0.5"),
        (5, 5, 0.5, "challenger", "+0 over the incumbent {} on 10 problems, not beyond the 0 of"),
        (9, 0, 0.95, "", "accuracy 0.9, need >= 0.95"),
    ],
)
def test_the_incumbent_has_to_be_beaten_beyond_chance(
    tmp_path: Path, num_right: int, before: int, min_value: float, alias: str, why: str
) -> None:
    bench = Bench(tmp_path)
    old = bench.publish("model", "old")
    decision, metrics = bench.decide(
        {"min_value": min_value},
        evaluation=bench.evaluation("now", num_right),
        model=bench.publish("model", "new"),
        incumbent=old,
        incumbent_evaluation=bench.evaluation("before", before),
    )
    assert decision.given_alias == alias
    assert why.format(old.digest[:12]) in decision.reason
    assert metrics["gain"] == pytest.approx((num_right - before) / 10)
    assert metrics["incumbent"] == before / 10
    assert metrics["promoted"] == float(alias == "champion")


def test_without_an_incumbent_the_minimum_alone_decides(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    inputs = {"evaluation": bench.evaluation("now", 5), "model": bench.publish("model", "new")}
    decision, metrics = bench.decide({"min_value": 0.5, "alias": "best"}, **inputs)
    assert decision.given_alias == "best"
    assert decision.reason == "accuracy 0.5, need >= 0.5; there is no incumbent"
    assert metrics == {"accuracy": 0.5, "promoted": 1.0}


def test_other_problems_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ended = bench.run(
        {},
        evaluation=bench.evaluation("now", 5),
        model=bench.publish("model", "new"),
        incumbent=bench.publish("model", "old"),
        incumbent_evaluation=bench.evaluation("before", 5, first=1),
    )
    assert ended.returncode == 2
    problem = bench.storage.channel("ab" * 32).read_error(0)
    assert problem is not None
    assert "inputs.incumbent_evaluation: got other problems than those" in json.dumps(
        problem.model_dump()
    )
