"""Fingerprints: what re-runs which stage, over a real store and the real wiring of the pipeline."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from committing_runner import ALL, MEASURING, run, two_rounds

from engines.config.stages.base import Runtime
from flows.plan import Planner
from flows.recipe.recipe import load_recipe
from flows.stage_order import run_stages
from infra.identity.fingerprint import next_fingerprint
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage
from tasks.runner import run as identity
from tasks.runner.run import numeric_sources
from tasks.runner.submission import Submission


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
        (["rollout.timeout_s=9"], ALL[3:]),
        (["training.collective_timeout_s=9", "rl.max_aborted_frac=0.5"], []),
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
            request=request,
            storage=storage,
            runtime=Runtime(),
            metadata={},
            follower="run",
            run_key="a" * 64,
        )
        submission.submit(Accepting(), 2, "again")  # type: ignore[arg-type]
        told = storage.channel(request.fingerprint).read_specification(2).then
        assert told is not None
        assert next_fingerprint(told, own.inputs["policy"]) == own.fingerprint
        assert {**told.spec.inputs, "policy": own.inputs["policy"]} == dict(own.inputs)
        assert (told.spec.sources, told.spec.libraries) == (own.sources, own.libraries)


def test_stage_needing_other_places_runs_in_its_own_job(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """The process of the stage before would hold its own place and wait for those of replicas."""
    runner = run(two_rounds("rollout.placement=disaggregated"), storage, tmp_path)
    for label, is_told in (("sft", False), ("rl_round_1", True)):
        request = runner.requests[label]
        assert request.then is not None
        submission = Submission(
            request=request,
            storage=storage,
            runtime=Runtime(),
            metadata={},
            follower="run",
            run_key="a" * 64,
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
