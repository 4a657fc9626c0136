"""What stages lacked and where time went; the order of findings, and the page of them."""

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engines.config.recipe import DiagnosisConfig
from engines.config.rollout import RolloutConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import HarnessStageConfig, MergeStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from engines.config.suite import HarnessConfig
from engines.config.training import LoraConfig, TrainingConfig
from flows.diagnosis.diagnosis import (
    DIAGNOSIS_MD,
    diagnose,
    html_page,
    markdown,
    text,
    write_diagnosis,
)
from flows.diagnosis.findings import Finding, StageView, stage_views
from flows.diagnosis.rules import resource_findings, step_times, time_findings
from flows.recipe.recipe import Recipe
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec
from infra.store.storage import LocalStorage
from infra.store.work_channel import Cause, JobProblem
from infra.tracking.journal import StageHistory
from tasks.runner.memory_knobs import memory_knobs

DEFAULTS = DiagnosisConfig()
RoundView = Callable[..., StageView]


def failed(view: StageView, cause: Cause, message: str = "words", phase: str = "") -> Finding:
    problem = JobProblem(type="X", message=message, exit_code=1, cause=cause, phase=phase)
    (finding,) = resource_findings(replace(view, problem=problem), DEFAULTS)
    return finding


@pytest.mark.parametrize(
    ("cause", "area", "advice"),
    [
        ("out_of_memory", "resources", "training.max_tokens_per_micro_batch"),
        ("disk_full", "resources", "free space"),
        ("dead_rank", "resources", "that rank's log"),
        ("hang", "resources", "the stacks"),
        ("non_finite", "algorithm", "the named rows"),
        ("", "resources", "the error"),
    ],
)
def test_a_cause_is_told_with_what_to_try(
    cause: Cause, area: str, advice: str, round_view: RoundView
) -> None:
    finding = failed(round_view(), cause)
    assert (finding.symptom, finding.area, finding.severity) == (cause or "failed", area, "failed")
    assert finding.text == "words"
    assert advice in finding.next[0]


def test_knobs_are_those_of_the_phase_and_not_at_their_smallest(recipe: Recipe) -> None:
    training = TrainingConfig(max_tokens_per_micro_batch=4096, gradient_checkpointing=True)
    config = RLRoundStageConfig.from_recipe(recipe, 1).model_copy(
        update={"training": training, "rollout": RolloutConfig(max_num_sequences=64)}
    )
    knobs = memory_knobs(config, "update_actor")
    assert knobs[0] == "training.max_tokens_per_micro_batch: 2048 instead of 4096"
    assert not any("gradient_checkpointing" in knob for knob in knobs)
    assert memory_knobs(config, "gen")[0] == "rollout.max_num_sequences: 32 instead of 64"
    smallest = training.model_copy(
        update={"max_tokens_per_micro_batch": 8, "lora": LoraConfig(rank=4)}
    )
    least = memory_knobs(config.model_copy(update={"training": smallest}))
    assert not any("micro_batch" in knob or "lora" in knob for knob in least)
    assert memory_knobs(MergeStageConfig.from_recipe(recipe))[0].startswith("merge.max_shard_bytes")
    assert memory_knobs(PreprocessStageConfig.from_recipe(recipe)) == []


def test_a_process_that_ended_without_a_word(round_view: RoundView) -> None:
    view = round_view(perf__max_memory_allocated_gb=[1.0, 2.0])
    (finding,) = resource_findings(replace(view, is_gone=True, phase="train"), DEFAULTS)
    assert finding.symptom == "killed"
    assert "in phase train after step 2" in finding.text
    assert str(finding.evidence[0]) == "perf/max_memory_allocated_gb 2 at step 2"
    assert not [*resource_findings(view, DEFAULTS)]


def test_memory_that_grows_and_replicas_that_are_lost(round_view: RoundView) -> None:
    grown = round_view(perf__max_memory_allocated_gb=[float(step) for step in range(1, 21)])
    (finding,) = resource_findings(grown, DEFAULTS)
    assert finding.symptom == "memory_growth"
    assert (finding.evidence[0].value, finding.evidence[0].step) == (18.0, 20)
    lost = round_view(rollout__num_restarts=[0.0, 1.0, 2.0])
    (finding,) = resource_findings(lost, DEFAULTS)
    assert (finding.symptom, finding.evidence[0].step) == ("replica_lost", 2)


def times(round_view: RoundView, gen: float, sync: float, step: float) -> StageView:
    columns = {"gen": gen, "update_weights": sync, "step": step}
    return round_view(**{f"timing_s__{name}": [value] * 9 for name, value in columns.items()})


def test_where_the_time_goes(round_view: RoundView) -> None:
    healthy = times(round_view, 8.0, 1.0, 10.0)
    assert step_times(healthy) == {"gen": 8.0, "update_weights": 1.0, "other": 1.0}
    (note,) = time_findings(healthy, DEFAULTS)
    assert (note.severity, note.symptom) == ("note", "time")
    assert note.text == "a step takes 10 s: gen 80%, update_weights 10%, other 10%"
    assert "rollout.max_num_sequences" in note.next[0]
    slow = [*time_findings(times(round_view, 5.0, 5.0, 10.0), DEFAULTS)]
    assert [each.symptom for each in slow] == ["time", "slow_sync"]
    waiting = [*time_findings(times(round_view, 5.0, 1.0, 10.0), DEFAULTS)]
    assert [each.symptom for each in waiting] == ["time", "waiting"]
    assert not [*time_findings(round_view(), DEFAULTS)]
    assert not [*time_findings(round_view(timing_s__step=[0.1] * 9), DEFAULTS)], "it has no phases"


@pytest.fixture
def sick(round_view: RoundView) -> StageView:
    """Something in every area."""
    view = times(round_view, 2.0, 7.0, 10.0)
    falls = {step: {"actor/entropy": 1.0 / step**3} for step in range(1, 10)}
    steps = {step: {**found, **falls[step]} for step, found in view.steps.items()}
    message = "</script><img src=x onerror=alert(1)> ``` # no\nsecond line"
    problem = JobProblem(type="X", message=message, exit_code=1, cause="disk_full")
    return replace(view, steps=steps, problem=problem)


def test_findings_order_resources_communication_algorithm(sick: StageView) -> None:
    thresholds = DiagnosisConfig(window_num_steps=3)
    diagnosis = diagnose("r", [sick], thresholds)
    found = [(each.area, each.symptom) for each in diagnosis.findings]
    assert found == [
        ("resources", "disk_full"),
        ("communication", "slow_sync"),
        ("communication", "time"),
        ("algorithm", "entropy_collapse"),
    ]
    assert diagnosis.verdict == (
        "r: disk_full (rl_round_1), slow_sync (rl_round_1), entropy_collapse (rl_round_1)"
    )
    assert diagnose("r", [], thresholds).verdict == "r: no findings"


def test_plots_of_rounds_and_of_sft_do_not_mix_their_steps(
    recipe: Recipe, round_view: RoundView
) -> None:
    memory = "perf/max_memory_allocated_gb"
    steps = {step: {memory: 9.0, "train/loss": 2.0 / step} for step in range(1, 8)}
    sft = StageView("sft", SFTStageConfig.from_recipe(recipe), steps)
    rounds = round_view(perf__max_memory_allocated_gb=[1.0, 2.0, 3.0])
    page = html_page(diagnose("r", [sft, rounds], DEFAULTS))
    loss, memory = page.split("<b>")[1:3]
    assert [title.partition("<")[0] for title in (loss, memory)] == ["loss", "peak memory, GB"]
    assert ">7</text>" in loss
    assert ">3</text>" in memory
    assert ">9</text>" not in memory


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


def test_what_is_said_stays_text_on_every_page(sick: StageView, tmp_path: Path) -> None:
    diagnosis = diagnose("<b>r</b>", [sick], DiagnosisConfig(window_num_steps=3))
    page = html_page(diagnosis)
    assert not Tags(page).tags & {"script", "img"}
    assert "default-src 'none'" in page
    assert page.count("<svg") == 2, "entropy, and seconds of a step"
    assert "entropy_collapse" in page
    told = markdown(diagnosis, tmp_path / "diagnosis.html")
    (line,) = [line for line in told.splitlines() if "disk_full**" in line]
    assert "```` </script><img" in line
    assert "next: free space there" in text(diagnosis)


def test_only_what_ails_is_told_in_markdown(sick: StageView, tmp_path: Path) -> None:
    path = write_diagnosis(diagnose("r", [sick], DEFAULTS), tmp_path)
    assert path.name == "diagnosis.html"
    assert (tmp_path / DIAGNOSIS_MD).exists()
    write_diagnosis(diagnose("r", [], DEFAULTS), tmp_path)
    assert not (tmp_path / DIAGNOSIS_MD).exists()
    assert "no findings" in path.read_text()


def test_stages_of_every_kind_are_read(tmp_path: Path) -> None:
    """A harness is the last kind that was added."""
    storage = LocalStorage(tmp_path)
    harness = HarnessConfig(tasks=("arc_easy",))
    config = HarnessStageConfig(suite="arc", harness=harness, rollout=RolloutConfig())
    fingerprint = "a" * 64
    storage.attempts.hold(fingerprint, Holder(id="b" * 32, process="test"), 0)
    spec = StageSpec(
        stage=config.stage, job_module=config.job_module, fingerprint=fingerprint, attempt=0,
        config=config.model_dump(mode="json"), inputs={}, seed=0, store_uri=storage.uri,
    )  # fmt: skip
    storage.channel(fingerprint).write_specification(spec)
    (view,) = stage_views(StageHistory(storage), [fingerprint])
    assert view.label == "harness_arc"
