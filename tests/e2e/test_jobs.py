"""The jobs as they are run: processes with a specification file, without Ray and Prefect.

Killed with SIGKILL and started again, a stage must end with the very bytes of a run that was
never disturbed, and with every metric once.
"""

import json
import math
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_bench import HOLDER, JOB_DEADLINE_S, Bench, Job, digest_of, metrics_of, steps_done
from tiny_stages import DATA, EVALUATE, MODEL, RL_ROUND, SFT

from engines.config.stages.base import Runtime
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from infra.identity.fingerprint import next_fingerprint
from infra.ray.api import JobRequest
from infra.store.heartbeat import Beat
from infra.store.process_stamp import is_dead
from infra.store.stage_spec import Artifact, CommitRecord, NextStage, StageSpec
from infra.store.storage import open_storage
from infra.tracking.journal import JournalRecord, read_journal
from infra.waiting import wait_for
from tasks.runner.earlier_work import find_adoptable
from tasks.runner.run import STAGE_SCHEMA_VERSION, StageRequest
from tasks.runner.submission import Submission


def _comparable(records: list[JournalRecord]) -> list[tuple[int | None, dict[str, float]]]:
    """Metrics without those that measure time."""
    return [
        (
            record.step,
            {
                name: value
                for name, value in record.values.items()
                if not name.startswith(("timing_s/", "perf/"))
            },
        )
        for record in records
    ]


@dataclass(frozen=True)
class Reference:
    """An undisturbed pipeline."""

    bench: Bench
    dataset: Artifact
    sft: CommitRecord
    rl: CommitRecord


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    bench = Bench(tmp_path_factory.mktemp("reference"))
    dataset = bench.run(bench.spec("preprocess", {"data": DATA, "model": MODEL}, {})).artifact
    sft = bench.run(bench.spec("sft", SFT, {"dataset": dataset}))
    rl = bench.run(bench.spec("rl_round", RL_ROUND, _rl_inputs(dataset, sft.artifact)))
    return Reference(bench, dataset, sft, rl)


def _rl_inputs(dataset: Artifact, policy: Artifact) -> dict[str, Artifact]:
    return {"dataset": dataset, "policy": policy, "reference": policy}


@pytest.mark.parametrize("stage", ["sft", "rl_round"])
def test_a_killed_stage_goes_on_under_another_fingerprint(stage: str, reference: Reference) -> None:
    """Adopted with less memory: the bytes of a run that was never disturbed, every metric once."""
    config = SFT if stage == "sft" else RL_ROUND
    expected = reference.sft if stage == "sft" else reference.rl
    inputs = {"dataset": reference.dataset}
    if stage == "rl_round":
        inputs = _rl_inputs(reference.dataset, reference.sft.artifact)
    bench = reference.bench
    old = bench.spec(stage, config, inputs).model_copy(
        update={"fingerprint": digest_of(f"{stage} half"), "schema_version": STAGE_SCHEMA_VERSION}
    )
    bench.kill_after_step(old, 6)
    kind = SFTStageConfig if stage == "sft" else RLRoundStageConfig
    training = {"num_threads": 1, "gradient_checkpointing": True}
    request = StageRequest(kind.model_validate({**config, "training": training}), inputs, seed=3)
    store = open_storage(str(bench.root / "store"))
    work = find_adoptable(store, request)
    assert work is not None
    assert "training.gradient_checkpointing auto -> True" in work.differs
    Submission(
        request=request,
        storage=store,
        runtime=Runtime(),
        metadata={},
        follower="me",
        run_key="a" * 64,
        adopts=work,
    ).submit(Processes(bench), 0, "")  # type: ignore[arg-type]
    record = store.lookup(request.fingerprint)
    assert record is not None
    assert record.artifact.digest == expected.artifact.digest
    assert record.adopted is not None
    assert (record.adopted.fingerprint, record.adopted.step) == (old.fingerprint, work.step)
    records, _ = read_journal(store, request.fingerprint)
    steps = [each.step for each in records if "training/global_step" in each.values]
    num_steps = int(expected.metrics["num_steps"])
    assert steps == list(range(1, num_steps + 1))
    done = [each.done for each in records if each.kind == "progress"]
    assert done == list(range(work.step + 1, num_steps + 1)), "no step is computed again"


class Processes:
    """A job server that runs every job to its end, here."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    cluster_id = ""

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        job = Job(request.argv, {**request.env, **self._bench.environment})
        code, output = job.ended(JOB_DEADLINE_S)
        assert code == 0, output
        return True


@pytest.mark.parametrize("stage", ["sft", "rl_round"])
def test_fault_row_2_stage_killed_twice_ends_bitwise_equal(
    stage: str, reference: Reference
) -> None:
    """SIGKILL at a random step, and again after it resumed: same bytes, every metric once."""
    config = SFT if stage == "sft" else RL_ROUND
    expected = reference.sft if stage == "sft" else reference.rl
    inputs = {"dataset": reference.dataset}
    if stage == "rl_round":
        inputs = _rl_inputs(reference.dataset, reference.sft.artifact)
    undisturbed = reference.bench.spec(stage, config, inputs)
    # The same store for the inputs, another fingerprint for the stage.
    spec = undisturbed.model_copy(update={"fingerprint": digest_of(stage)})
    num_steps = (
        config["rl"]["num_steps_per_round"] if stage == "rl_round" else config["sft"]["num_steps"]
    )
    first, second = sorted(random.Random(time.time_ns()).sample(range(1, num_steps), 2))
    bench = reference.bench
    bench.kill_after_step(spec, first)
    bench.kill_after_step(spec.model_copy(update={"attempt": 1}), second)
    record = bench.run(spec.model_copy(update={"attempt": 2}))
    assert record.artifact.digest == expected.artifact.digest, (first, second)
    assert record.metrics == expected.metrics
    steps = [entry.step for entry in metrics_of(spec) if "training/global_step" in entry.values]
    assert steps == list(range(1, num_steps + 1))
    assert _comparable(metrics_of(spec)) == _comparable(metrics_of(undisturbed))


def test_stage_stopped_in_publish_is_fenced_and_repeats_no_step(
    reference: Reference,
) -> None:
    bench = Bench(reference.bench.root, {"RLHF_FAULTS": "storage.before_publish=stop"})
    spec = bench.spec("sft", SFT, {"dataset": reference.dataset})
    spec = spec.model_copy(update={"fingerprint": digest_of("stopped")})
    stopped = bench.start(spec)
    try:
        process = psutil.Process(stopped.pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the stop", JOB_DEADLINE_S)
        record = reference.bench.run(spec.model_copy(update={"attempt": 1}))
        process.resume()
        _, output = stopped.ended(60.0)
    finally:
        stopped.kill()
    assert "FencedError" in output
    assert record.artifact.digest == reference.sft.artifact.digest
    store = open_storage(spec.store_uri)
    assert store.lookup(spec.fingerprint) == record
    store.verify(record.artifact, "bytes")
    assert [entry.step for entry in metrics_of(spec)] == list(range(1, SFT["sft"]["num_steps"] + 1))


def test_sampler_and_trainer_agree_in_every_rl_step(reference: Reference) -> None:
    """Rollout logprobs against the training engine's on the same tokens: <= 1e-4 in fp32."""
    inputs = _rl_inputs(reference.dataset, reference.sft.artifact)
    spec = reference.bench.spec("rl_round", RL_ROUND, inputs)
    trained = [r.values for r in metrics_of(spec) if r.values.get("training/skipped_steps") == 0]
    assert trained
    for values in trained:
        assert 0 <= values["mismatch/logprob_abs_mean"] <= values["mismatch/logprob_abs_max"]
        assert values["mismatch/logprob_abs_max"] <= 1e-4
        assert values["training/rollout_probs_diff_max"] <= 1e-4


def test_rl_reports_under_the_names_that_users_of_verl_know(reference: Reference) -> None:
    inputs = _rl_inputs(reference.dataset, reference.sft.artifact)
    spec = reference.bench.spec("rl_round", RL_ROUND, inputs)
    trained = [r.values for r in metrics_of(spec) if r.values.get("training/skipped_steps") == 0]
    assert trained[0].keys() >= {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/kl_loss",
        "actor/grad_norm",
        "actor/lr",
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "response_length/mean",
        "response_length/clip_ratio",
        "prompt_length/mean",
        "timing_s/gen",
        "timing_s/reward",
        "timing_s/old_log_prob",
        "timing_s/ref",
        "timing_s/adv",
        "timing_s/update_actor",
        "timing_s/update_weights",
        "timing_s/step",
        "perf/throughput",
        "perf/total_num_tokens",
        "training/global_step",
        "training/epoch",
        "training/rollout_probs_diff_mean",
    }
    assert all(math.isfinite(value) for values in trained for value in values.values())
    assert reference.rl.metrics == {"num_steps": 8.0}
    assert reference.rl.seconds.keys() >= {"load", "gen", "reward", "train", "save"}
    assert sum(v for k, v in reference.rl.seconds.items() if k != "total") <= (
        reference.rl.seconds["total"] + 0.5
    )


def test_the_rest_of_the_pipeline(reference: Reference) -> None:
    """A second round continues the optimizer; merge, evaluate and promote follow."""
    bench, dataset = reference.bench, reference.dataset
    plain = {**RL_ROUND["rl"], "num_steps_per_round": 2, "algorithm": {}, "num_epochs": 1}
    second = {**RL_ROUND, "round": 2, "rl": plain}
    inputs = {"dataset": dataset, "policy": reference.rl.artifact}
    spec = bench.spec("rl_round", second, inputs)
    round_2 = bench.run(spec)
    assert [r.step for r in metrics_of(spec) if "actor/lr" in r.values] == [3, 4]
    directory = Path(round_2.artifact.uri)
    engine_state = json.loads((directory / "checkpoint" / "engine.json").read_text())
    before = json.loads(
        (Path(reference.rl.artifact.uri) / "checkpoint" / "engine.json").read_text()
    )
    assert engine_state["num_optimizer_steps"] == before["num_optimizer_steps"] + 4
    model = bench.run(
        bench.spec("merge", {"backend": "fsdp2"}, {"policy": round_2.artifact})
    ).artifact
    evaluated = bench.run(bench.spec("evaluate", EVALUATE, {"model": model, "dataset": dataset}))
    # The merged model is the policy: the same answers, text by text.
    inputs = {"policy": round_2.artifact, "dataset": dataset}
    of_policy = bench.spec("evaluate", {**EVALUATE, "backend": "fsdp2"}, inputs)
    assert bench.run(of_policy).artifact.digest == evaluated.artifact.digest
    assert [record.step for record in metrics_of(of_policy)] == [4]
    assert {"accuracy", "accuracy_low", "pass@1", "pass@4"} <= evaluated.metrics.keys()
    inputs = {"evaluation": evaluated.artifact, "model": model}
    for min_value, promoted in ((0.0, True), (1.0, False)):
        gate = {"promote": {"min_value": min_value}}
        decision = Path(bench.run(bench.spec("promote", gate, inputs)).artifact.uri)
        content = json.loads((decision / "decision.json").read_text())
        assert content["promoted"] is promoted
        assert content["model_digest"] == model.digest


@pytest.mark.parametrize("training", [{}, {"lora": {"rank": 4}}])
def test_evaluation_after_training_equals_that_of_a_separate_job(
    training: dict[str, Any], reference: Reference
) -> None:
    """The training's process goes on with it once its policy is committed."""
    bench, inputs = reference.bench, {"dataset": reference.dataset}
    config = {**SFT, "training": {"num_threads": 1, **training}, "sft": {"num_steps": 2}}
    spec = bench.spec("sft", config, inputs)
    store = open_storage(spec.store_uri)
    store.attempts.join(spec.fingerprint, "run")
    after = _evaluation_after(bench, {**EVALUATE, "backend": "fsdp2"}, inputs)
    trained = bench.run(spec.model_copy(update={"then": after}))
    name = next_fingerprint(after, trained.artifact)
    warm = store.lookup(name)
    assert warm is not None
    [held, committed] = store.attempts.entries(name)
    assert held.holder.process == _beat(spec).process, "one process did both"
    assert committed.holder.ray_job == "sft-a0"
    assert {spec.fingerprint, name} <= {*store.attempts.followed_by("run")}
    told = store.channel(name).read_specification(0)
    assert told.inputs["policy"].fingerprint == spec.fingerprint
    cold = bench.run(bench.spec("evaluate", told.config, told.inputs))
    assert warm.artifact.digest == cold.artifact.digest
    assert warm.metrics == cold.metrics


@pytest.mark.parametrize("why", ["committed", "other code", "damaged log"])
def test_unclaimable_evaluation_is_skipped_and_policy_commits(
    why: str, reference: Reference
) -> None:
    bench, inputs = reference.bench, {"dataset": reference.dataset}
    spec = bench.spec("sft", {**SFT, "sft": {"num_steps": 1}}, inputs)
    spec = spec.model_copy(update={"fingerprint": digest_of(why)})
    after = _evaluation_after(bench, {**EVALUATE, "backend": "fsdp2"}, inputs, name=why)
    if why == "other code":
        spec_of_other_code = after.spec.model_copy(update={"sources": {"engines.types": "0" * 64}})
        after = after.model_copy(update={"spec": spec_of_other_code})
    known = bench.run(spec.model_copy(update={"fingerprint": digest_of(f"{why} before")}))
    store, name = open_storage(spec.store_uri), next_fingerprint(after, known.artifact)
    if why == "committed":
        held = store.attempts.hold(name, HOLDER, 0)
        store.commit(held, known.model_copy(update={"fingerprint": name}))
    elif why == "damaged log":
        (Path(spec.store_uri) / "stages" / name).mkdir()
        (Path(spec.store_uri) / "stages" / name / "0").write_text("{")
    trained = bench.run(spec.model_copy(update={"then": after}))
    assert trained.artifact.digest == known.artifact.digest
    assert store.channel(name).read_beat(0) is None, "nobody began it"
    if why != "damaged log":
        assert len(store.attempts.entries(name)) == (2 if why == "committed" else 0)


def test_evaluation_failing_after_training_keeps_the_policy(reference: Reference) -> None:
    bench, inputs = reference.bench, {"dataset": reference.dataset}
    broken = {**EVALUATE, "backend": "fsdp2", "rollout": {"engine": "none"}}
    after = _evaluation_after(bench, broken, inputs)
    spec = bench.spec("sft", {**SFT, "sft": {"num_steps": 1}}, inputs)
    process = bench.start(spec.model_copy(update={"then": after}))
    code, output = process.ended(JOB_DEADLINE_S)
    assert code == 2, output
    store = open_storage(spec.store_uri)
    trained = store.lookup(spec.fingerprint)
    assert trained is not None
    assert store.channel(spec.fingerprint).read_error(0) is None
    problem = store.channel(next_fingerprint(after, trained.artifact)).read_error(0)
    assert problem is not None
    assert (problem.exit_code, "rollout.engine" in problem.message) == (2, True)


def test_job_killed_between_claim_and_commit_leaves_dead_attempt(
    reference: Reference,
) -> None:
    """The policy is trained again to the same bytes; its evaluation is left to the next attempt."""
    inputs = {"dataset": reference.dataset}
    bench = Bench(reference.bench.root, {"RLHF_FAULTS": "storage.before_commit=kill"})
    spec = bench.spec("sft", {**SFT, "sft": {"num_steps": 3}}, inputs)
    after = _evaluation_after(bench, {**EVALUATE, "backend": "fsdp2"}, inputs)
    spec = spec.model_copy(update={"then": after})
    process = bench.start(spec)
    code, output = process.ended(JOB_DEADLINE_S)
    assert code == -signal.SIGKILL, output
    again = reference.bench.run(spec.model_copy(update={"attempt": 1}))
    store, name = open_storage(spec.store_uri), next_fingerprint(after, again.artifact)
    [held] = store.attempts.entries(name)
    assert is_dead(held.holder.process)
    assert store.channel(name).read_beat(0) is None


def _evaluation_after(
    bench: Bench, config: dict[str, Any], inputs: Mapping[str, Artifact], name: str = ""
) -> NextStage:
    identity = {"config": [name, config], "inputs": {n: a.digest for n, a in inputs.items()}}
    return NextStage(
        spec=bench.spec("evaluate", config, inputs),
        identity=identity,
        follower="run",
        run_key="a" * 64,
    )


def _beat(spec: StageSpec) -> Beat:
    beat = open_storage(spec.store_uri).channel(spec.fingerprint).read_beat(spec.attempt)
    assert beat is not None
    return beat


def test_equal_runs_publish_equal_bytes(reference: Reference, tmp_path: Path) -> None:
    other = Bench(tmp_path)
    dataset = other.run(other.spec("preprocess", {"data": DATA, "model": MODEL}, {})).artifact
    assert dataset.digest == reference.dataset.digest


def test_sigterm_ends_a_job_at_once_and_it_resumes(reference: Reference) -> None:
    bench = reference.bench
    spec = bench.spec("sft", SFT, {"dataset": reference.dataset})
    spec = spec.model_copy(update={"fingerprint": digest_of("sigterm")})
    process = bench.start(spec)
    wait_for(lambda: steps_done(spec) >= 6, "step 6", JOB_DEADLINE_S, poll_s=0.002)
    process.terminate()
    code, output = process.ended(20.0)
    assert code == 143, output
    problem = open_storage(spec.store_uri).channel(spec.fingerprint).read_error(0)
    assert problem is not None
    assert problem.exit_code == 143
    record = bench.run(spec.model_copy(update={"attempt": 1}))
    assert record.artifact.digest == reference.sft.artifact.digest
