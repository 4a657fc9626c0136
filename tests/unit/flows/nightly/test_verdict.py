"""The rules of a verdict, each with a case made by hand, and what holds whatever was measured."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.nightly.measurement import Machine, Made, Measurement, Observed, Run
from flows.nightly.night import MIN_RUNS, NOTHING_DIFFERS, judge

HERE = Machine(
    platform="cpu",
    device_kind="x86_64",
    processor="a processor",
    num_cores=2,
    memory_gib=8,
    system="Linux x86_64",
)
SFT_FILE, RL_FILE = "engines/algorithms/supervised.py", "engines/algorithms/kl.py"
FIGURES = {
    "sft": Observed(curve=(4.0, 3.0, 2.5, 2.2), tokens_per_s=100.0, peak_bytes=1000.0),
    "rl_round_1": Observed(curve=(0.1, 0.2, 0.3, 0.4), tokens_per_s=50.0, peak_bytes=2000.0),
    "evaluate": Observed(accuracy=0.5, accuracy_room=0.04),
}


@dataclass
class Case:
    """A measurement that can be changed."""

    machine: Machine = HERE
    settings: dict[str, Any] = field(default_factory=lambda: {"sft.lr": 0.001, "seed": 0})
    digests: dict[str, str] = field(default_factory=lambda: {label: "1" for label in FIGURES})
    own_settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=lambda: {SFT_FILE: "1", RL_FILE: "1"})
    libraries: dict[str, str | None] = field(default_factory=lambda: {"torch": "2.13.0"})
    data: dict[str, str] = field(default_factory=dict)
    runs: tuple[dict[str, Observed], ...] = (FIGURES,)
    stopped_at: str = ""

    def measured(self) -> Measurement:
        reached = {"sft": [SFT_FILE], "rl_round_1": [RL_FILE], "evaluate": []}
        return Measurement(
            recipe="tiny",
            machine=self.machine,
            settings=self.settings,
            stages={
                label: Made(
                    digest=digest,
                    settings=self.own_settings.get(label, ""),
                    sources=label,
                    libraries=self.libraries,
                    data=self.data,
                )
                for label, digest in self.digests.items()
            },
            sources={
                label: {file: self.files[file] for file in files}
                for label, files in reached.items()
            },
            runs=tuple(
                Run(night=f"night {number}", stages=stages)
                for number, stages in enumerate(self.runs)
            ),
            stopped_at=self.stopped_at,
            problem="it did not fit" if self.stopped_at else "",
        )


def changed(label: str, **values: Any) -> tuple[dict[str, Observed], ...]:
    return ({**FIGURES, label: FIGURES[label].model_copy(update=values)},)


def from_stage(label: str) -> dict[str, str]:
    """Digests where those of a stage and of all after it are others."""
    labels = list(FIGURES)
    return {each: "2" if each in labels[labels.index(label) :] else "1" for each in labels}


def test_equal_digests_pass_whatever_the_clock() -> None:
    slow = Case(runs=changed("sft", tokens_per_s=10.0))
    verdict = judge(Case(runs=(FIGURES,) * MIN_RUNS).measured(), slow.measured())
    assert (verdict.word, verdict.stage, verdict.problems) == ("pass", "", ())
    assert verdict.notes == ("sft: 10 tokens/s, 0.10 of the stored median",)


def test_equal_digests_of_other_sources_pass() -> None:
    verdict = judge(Case().measured(), Case(files={SFT_FILE: "2", RL_FILE: "2"}).measured())
    assert verdict.word == "pass"


def test_a_stage_that_does_not_repeat_drifts() -> None:
    verdict = judge(Case().measured(), Case(digests=from_stage("rl_round_1")).measured())
    assert (verdict.word, verdict.stage) == ("drift", "rl_round_1")
    assert verdict.causes == (NOTHING_DIFFERS,)


def test_an_edit_names_the_first_stage_and_the_file() -> None:
    edited = Case(
        digests=from_stage("rl_round_1"),
        files={SFT_FILE: "1", RL_FILE: "2"},
        runs=changed("rl_round_1", curve=(0.1, 0.21, 0.3, 0.4)),
    )
    verdict = judge(Case().measured(), edited.measured())
    assert (verdict.word, verdict.stage) == ("drift", "rl_round_1")
    assert verdict.causes == (f"sources: {RL_FILE}",)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"libraries": {"torch": "2.14.0"}}, "libraries: torch 2.13.0 -> 2.14.0"),
        ({"data": {"train": "2"}}, "data: train"),
        (
            {"settings": {"sft.lr": 0.002, "seed": 0}, "own_settings": {"sft": "2"}},
            "settings: sft.lr 0.001 -> 0.002",
        ),
    ],
)
def test_the_cause_of_a_drift_is_named(change: dict[str, Any], cause: str) -> None:
    verdict = judge(Case().measured(), Case(digests=from_stage("sft"), **change).measured())
    assert (verdict.word, verdict.stage, verdict.causes) == ("drift", "sft", (cause,))


def test_settings_of_another_stage_are_no_cause() -> None:
    other = Case(digests=from_stage("rl_round_1"), settings={"sft.lr": 0.002, "seed": 0})
    assert judge(Case().measured(), other.measured()).causes == (NOTHING_DIFFERS,)


@pytest.mark.parametrize("curve", [(4.0, 3.0, 2.5, 2.7), (4.0, 3.0, 1.0, 0.5)])
def test_a_curve_beyond_the_spread_fails_in_either_direction(curve: tuple[float, ...]) -> None:
    night = Case(
        digests=from_stage("sft"),
        settings={"sft.lr": 0.01, "seed": 0},
        own_settings={"sft": "2"},
        runs=changed("sft", curve=curve),
    )
    stored = Case(runs=changed("sft", curve=(4.0, 3.4, 2.8, 2.2)))
    verdict = judge(stored.measured(), night.measured())
    assert (verdict.word, verdict.stage, verdict.drifted) == ("fail", "sft", "sft")
    assert verdict.causes == ("settings: sft.lr 0.001 -> 0.01",)
    assert "curve" in verdict.problems[0]


def test_a_curve_that_is_no_number_fails() -> None:
    night = Case(digests=from_stage("sft"), runs=changed("sft", curve=(4.0, float("nan"))))
    assert judge(Case().measured(), night.measured()).stage == "sft"


def test_noise_of_the_steps_is_room_for_a_curve() -> None:
    noisy = tuple(0.5 + 0.1 * (-1) ** step for step in range(40))
    stored = Case(runs=changed("rl_round_1", curve=noisy))
    night = Case(
        digests=from_stage("rl_round_1"),
        runs=changed("rl_round_1", curve=tuple(value + 0.05 for value in noisy)),
    )
    assert judge(stored.measured(), night.measured()).word == "drift"


@pytest.mark.parametrize(
    ("accuracy", "word"), [(0.55, "fail"), (0.53, "drift"), (0.39, "drift"), (0.35, "fail")]
)
def test_the_spread_of_accuracies_is_that_of_all_runs(accuracy: float, word: str) -> None:
    stored = Case(runs=(*changed("evaluate", accuracy=0.42), FIGURES))
    night = Case(digests=from_stage("rl_round_1"), runs=changed("evaluate", accuracy=accuracy))
    verdict = judge(stored.measured(), night.measured())
    assert verdict.word == word
    assert verdict.stage == ("evaluate" if word == "fail" else "rl_round_1")
    assert verdict.drifted == "rl_round_1"


@pytest.mark.parametrize(
    ("num_runs", "machine", "word"),
    [
        (MIN_RUNS, HERE, "fail"),
        (MIN_RUNS - 1, HERE, "pass"),
        (MIN_RUNS, HERE.model_copy(update={"num_cores": 4}), "pass"),
    ],
)
def test_memory_fails_where_it_can_be_compared(num_runs: int, machine: Machine, word: str) -> None:
    night = Case(machine=machine, runs=changed("sft", peak_bytes=1200.0))
    verdict = judge(Case(runs=(FIGURES,) * num_runs).measured(), night.measured())
    assert verdict.word == word
    assert len(verdict.problems) + len(verdict.notes) == 1


def test_speed_fails_where_the_digest_is_another() -> None:
    night = Case(digests=from_stage("rl_round_1"), runs=changed("rl_round_1", tokens_per_s=30.0))
    verdict = judge(Case(runs=(FIGURES,) * MIN_RUNS).measured(), night.measured())
    assert verdict.problems == ("rl_round_1: 30 tokens/s, 0.60 of the stored median",)
    assert verdict.word == "fail"


def test_another_processor_compares_figures_and_no_digests() -> None:
    elsewhere = HERE.model_copy(update={"processor": "another"})
    night = Case(machine=elsewhere, digests=from_stage("sft"))
    verdict = judge(Case().measured(), night.measured())
    assert (verdict.word, verdict.drifted) == ("pass", "")
    assert "digests were not compared" in verdict.notes[0]
    worse = Case(machine=elsewhere, digests=from_stage("sft"), runs=changed("evaluate", accuracy=0))
    assert judge(Case().measured(), worse.measured()).stage == "evaluate"


def test_a_run_that_stopped_fails_there_and_tells_what_differs() -> None:
    digests = {"sft": "1", "rl_round_1": ""}
    night = Case(digests=digests, files={SFT_FILE: "1", RL_FILE: "2"}, stopped_at="rl_round_1")
    verdict = judge(Case().measured(), night.measured())
    assert (verdict.word, verdict.stage) == ("fail", "rl_round_1")
    assert verdict.problems == ("rl_round_1: it did not fit",)
    assert verdict.causes == (f"sources: {RL_FILE}",)
    assert judge(None, night.measured()).word == "fail"


def test_without_a_baseline_nothing_passes() -> None:
    assert judge(None, Case().measured()).word == "drift"


figures = st.builds(
    Observed,
    curve=st.lists(st.floats(-1e6, 1e6), max_size=9).map(tuple),
    accuracy=st.none() | st.floats(0, 1),
    accuracy_room=st.floats(0, 0.2),
    tokens_per_s=st.none() | st.floats(0, 1e6),
    peak_bytes=st.none() | st.floats(0, 1e12),
)
stages = st.fixed_dictionaries(dict.fromkeys(FIGURES, figures))
cases = st.builds(
    Case,
    machine=st.sampled_from([HERE, HERE.model_copy(update={"processor": "another"})]),
    digests=st.fixed_dictionaries(dict.fromkeys(FIGURES, st.sampled_from("12"))),
    files=st.fixed_dictionaries(dict.fromkeys([SFT_FILE, RL_FILE], st.sampled_from("12"))),
    runs=st.lists(stages, min_size=1, max_size=4).map(tuple),
).map(Case.measured)


@given(cases)
def test_whatever_is_stored_is_reproduced_by_itself(case: Measurement) -> None:
    verdict = judge(case, case)
    assert (verdict.word, verdict.stage, verdict.problems) == ("pass", "", ())


@given(cases, cases)
def test_a_verdict_is_consistent(stored: Measurement, night: Measurement) -> None:
    verdict = judge(stored, night)
    assert verdict == judge(stored, night)
    assert (verdict.word == "fail") == bool(verdict.problems)
    assert bool(verdict.stage) == (verdict.word != "pass")
    assert bool(verdict.causes) == bool(verdict.drifted)
    if stored.machine != night.machine:
        assert not verdict.drifted
    if verdict.word == "drift":
        assert verdict.stage == verdict.drifted
        assert stored.stages[verdict.stage].digest != night.stages[verdict.stage].digest


@given(cases, cases, figures)
def test_a_run_more_never_makes_the_spread_narrower(
    stored: Measurement, night: Measurement, more: Observed
) -> None:
    """The newest run stays the newest, since the room is taken from it.

    Of what no run had a figure a run more may have the first, which is compared from then on.
    """
    before = judge(stored, night)
    had = {
        name: all(each.stages.get(stage) and getattr(each.stages[stage], name) not in (None, ())
                  for each in stored.runs for stage in FIGURES)
        for name in ("curve", "accuracy", "tokens_per_s", "peak_bytes")
    }  # fmt: skip
    none = Observed(curve=(), accuracy=None, accuracy_room=0.0, tokens_per_s=None, peak_bytes=None)
    more = more.model_copy(
        update={name: getattr(none, name) for name, known in had.items() if not known}
    )
    extra = Run(night="earlier", stages=dict.fromkeys(FIGURES, more))
    wider = stored.model_copy(update={"runs": (*[extra] * MIN_RUNS, *stored.runs)})
    if before.word == "drift" and len(stored.runs) >= MIN_RUNS:
        assert judge(wider, night).word == "drift"
