"""The contract of a training backend: `pytest --pyargs rlhf.testing.test_backend --backend NAME`.

Every layout that the backend claims is run at world sizes 1, 2 and 4 and compared with a plain
transformers loop: losses, gradient norms (Adam hides a wrong scale of the gradients),
log-probabilities, checkpoints across layouts, streamed weights, values, adapters, guards.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.testing.context import Context, check_runnable, train
from rlhf.testing.expectations import (
    LOGPROB,
    NORM,
    check_logprobs,
    check_resumed,
    check_steps,
    check_values,
    check_weights,
    columns,
    written_model,
)
from rlhf.testing.layouts import ACCUMULATED, LAYOUTS, PRIMARY, Layout, claimed_layouts
from rlhf.testing.plain_loop import (
    NUM_STEPS,
    load,
    logprobs_of,
    make_batch,
    train_plainly,
    without_mask,
)
from rlhf.testing.ranks import RankResults, run_ranks
from rlhf.testing.tiny_models import write_tiny_models
from safetensors.torch import load_file

from engines import collectives
from engines.checkpoint.model_directory import stored_tensor_names
from engines.config.backends import BACKENDS
from engines.training.backends.merging import merge_checkpoint
from engines.weight_places import WeightPlace
from engines.weight_sync.sharded import make_plan

Case = Callable[[Layout, str], dict[str, Any]]
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def claims_of(config: pytest.Config) -> frozenset[str]:
    """What the backend under test can do: from the project's table, or as the caller says."""
    backend = BACKENDS.get(config.getoption("--backend"))
    if backend is None:
        return frozenset(filter(None, config.getoption("--claims").split(",")))
    values = {"value_model"} if backend.value_model else set()
    return frozenset({*backend.parallelism, *backend.features, *values})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" not in metafunc.fixturenames:
        return
    claims = claims_of(metafunc.config)
    layouts = [layout for size in (1, 2, 4) for layout in claimed_layouts(claims, size)]
    metafunc.parametrize(
        "layout",
        [
            pytest.param(layout, marks=[pytest.mark.slow] if layout.world_size > 2 else [])
            for layout in layouts
        ],
        ids=[layout.name for layout in layouts],
    )


@pytest.fixture(scope="module")
def claims(request: pytest.FixtureRequest) -> frozenset[str]:
    return claims_of(request.config)


@pytest.fixture(scope="module", autouse=True)
def _runnable(request: pytest.FixtureRequest) -> None:
    check_runnable(request.config)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and what the ranks leave behind."""
    root = tmp_path_factory.mktemp("backend")
    write_tiny_models(root)
    return root


@pytest.fixture(scope="module")
def ranks(
    claims: frozenset[str], root: Path, request: pytest.FixtureRequest
) -> Callable[[int], RankResults]:
    """`ranks(world_size)`: results of every rank; smaller world sizes have run before."""
    done: dict[int, RankResults | Exception] = {}
    name, platform = (request.config.getoption(o) for o in ("--backend", "--platform"))

    def run(world_size: int) -> RankResults:
        for size in (1, 2, 4):
            if size <= world_size and size not in done:
                try:
                    done[size] = run_ranks(name, claims, root, size, platform)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    done[size] = error  # for every test that asks; it is not tried again
        found = done[world_size]
        if isinstance(found, Exception):
            raise found
        return found

    return run


@pytest.fixture
def case(ranks: Callable[[int], RankResults]) -> Case:
    """`case(layout, name)`: results of a case on rank 0."""

    def find(layout: Layout, name: str) -> dict[str, Any]:
        return found_in(ranks(layout.world_size)[0], layout, name)

    return find


def found_in(results: dict[str, Any], layout: Layout, name: str) -> dict[str, Any]:
    found = results[layout.name].get(name, {"error": "an earlier case failed"})
    assert "error" not in found, found["error"]
    return found


def test_trains_as_a_plain_loop_does(case: Case, root: Path, layout: Layout) -> None:
    steps = case(layout, "case_trains")
    check_steps(steps["plain"], train_plainly(root / layout.model))
    for model in ("llama", "qwen3_moe"):
        if model in steps:
            check_steps(steps[model], train_plainly(root / model))


def test_the_split_does_not_change_the_result(case: Case, layout: Layout) -> None:
    steps = case(layout, "case_trains")
    for way, rows in steps.items():
        if way in ("plain", "llama", "qwen3_moe") or way.startswith("bfloat16"):
            continue
        for ours, plain in zip(rows, steps["plain"], strict=True):
            assert ours == pytest.approx(plain, rel=NORM), way


@pytest.mark.parametrize("name", PRIMARY)
def test_bfloat16_stays_close(case: Case, name: str) -> None:
    steps = case(BY_NAME[name], "case_trains")
    for way in ("bfloat16", "bfloat16_micro_batches"):
        assert columns(steps[way], 0) == pytest.approx(columns(steps["plain"], 0), abs=0.03)
        assert columns(steps[way], 1) == pytest.approx(columns(steps["plain"], 1), rel=0.06)
    assert steps["bfloat16"] != steps["plain"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if BY_NAME[name].world_size > 2 else [])
        for name in ACCUMULATED
    ],
)
def test_many_micro_batches_add_up_in_float32_and_to_shards(
    case: Case, claims: frozenset[str], name: str
) -> None:
    if BY_NAME[name] not in claimed_layouts(claims, BY_NAME[name].world_size):
        pytest.skip("needs a backend that claims the layout")
    found = case(BY_NAME[name], "case_accumulates")
    assert found["many"] == pytest.approx(found["one"], rel=1e-5)
    # Gradients in float32 of the weights that the rank holds itself, and nothing of the others'.
    assert max(found["held_bytes"]) < 1.25 * 4 * found["num_own_values"]


def test_every_rank_reports_the_same(ranks: Callable[[int], RankResults], layout: Layout) -> None:
    first, *others = (
        found_in(results, layout, "case_trains") for results in ranks(layout.world_size)
    )
    assert all(other == first for other in others)


def test_logprobs(case: Case, root: Path, layout: Layout) -> None:
    inferred = case(layout, "case_infers")
    logprobs, entropies, squares = logprobs_of(load(root / layout.model), make_batch(0))
    assert inferred["packed"] == pytest.approx(logprobs, abs=LOGPROB)
    assert inferred["entropy"] == pytest.approx(entropies, abs=LOGPROB)
    assert inferred["sum_pi_squared"] == pytest.approx(squares, abs=LOGPROB)
    assert inferred["alone"] == pytest.approx(inferred["packed"], abs=2e-6)
    assert inferred["frozen"] == inferred["packed"]
    assert inferred["small"] == pytest.approx(inferred["packed"], abs=2e-6)
    assert inferred["train_minus_infer"] in (0.0, None)
    assert inferred["masked_are_zero"]


def test_the_last_stage_sees_what_inference_sees(
    ranks: Callable[[int], RankResults], layout: Layout
) -> None:
    """Some rank holds outputs in training, and they are those of inference."""
    seen = [
        found_in(results, layout, "case_infers")["train_minus_infer"]
        for results in ranks(layout.world_size)
    ]
    assert 0.0 in seen


def test_resume_under_the_same_layout_is_bitwise(case: Case, layout: Layout) -> None:
    saved = case(layout, "case_checkpoints")
    assert saved[f"from-{layout.name}"] == saved["continued"]
    assert saved[f"from-{layout.name}-bitwise"]


def test_a_checkpoint_written_while_training_goes_on_is_the_same(
    case: Case, layout: Layout
) -> None:
    assert case(layout, "case_checkpoints")["behind_is_equal"]


def test_resume_from_fewer_ranks(case: Case, layout: Layout) -> None:
    saved = case(layout, "case_checkpoints")
    for fewer in ("alone", "data2"):
        if f"from-{fewer}" in saved and fewer != layout.name:
            check_resumed(saved[f"from-{fewer}"], saved["continued"])


def test_resume_on_one_rank(
    case: Case, root: Path, layout: Layout, claims: frozenset[str], request: pytest.FixtureRequest
) -> None:
    continued = case(layout, "case_checkpoints")["continued"]
    engine = alone(request, root, claims, layout).engine(load=False)
    engine.load_checkpoint(root / f"checkpoint-{layout.name}")
    check_resumed(train(engine, range(2, NUM_STEPS)), continued)
    collectives.close_process_group()


def alone(
    request: pytest.FixtureRequest, root: Path, claims: frozenset[str], layout: Layout
) -> Context:
    """The model of a layout in this process alone."""
    name, platform = (request.config.getoption(o) for o in ("--backend", "--platform"))
    return Context(name, claims, Layout("here", 1, model=layout.model), root, platform)


def test_the_average_is_torchs_and_outlives_a_save(case: Case, layout: Layout) -> None:
    average = case(layout, "case_average")
    if "refused" in average:  # by a backend that keeps none
        assert average["refused"].startswith("optimizer.ema: got one; ")
        return
    assert average["steps"] == case(layout, "case_trains")["plain"]
    assert average["after_two"] < 1e-7
    assert average["at_the_end"] < 1e-7
    assert average["adopts"] == [True, False]
    assert average["resumed_is_equal"]
    assert average["begins_anew"]
    assert all(average[name] for name in ("from-alone", "from-data2") if name in average)


@pytest.mark.parametrize("name", ["data2", pytest.param("data4", marks=[pytest.mark.slow])])
def test_a_rank_keeps_the_average_of_its_own_weights(case: Case, name: str) -> None:
    average = case(BY_NAME[name], "case_average")
    # One that is not claimed may be of whole weights, as the weights of each rank are.
    claimed = average.get("claimed", False)
    assert not claimed or average["share"] < 1.1 / BY_NAME[name].world_size


@pytest.mark.parametrize("name", PRIMARY)
def test_inference_in_between_changes_nothing(case: Case, name: str) -> None:
    continued = case(BY_NAME[name], "case_checkpoints")["continued"]
    after = case(BY_NAME[name], "case_inference_leaves_no_trace")
    unchanged, resumed = after["float32"]
    assert unchanged
    assert resumed == continued
    unchanged, resumed = after["bfloat16"]
    assert unchanged
    assert columns(resumed, 0) == pytest.approx(columns(continued, 0), abs=0.03)


def test_weights_only_starts_the_optimizer_anew(case: Case, layout: Layout) -> None:
    saved = case(layout, "case_checkpoints")
    assert saved["weights_only"][0] == pytest.approx(saved["continued"][0], rel=5e-6)
    assert saved["weights_only"][1][0] != pytest.approx(saved["continued"][1][0], abs=1e-4)


def test_streamed_and_merged_weights(
    case: Case, root: Path, layout: Layout, tmp_path: Path, claims: frozenset[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    case(layout, "case_checkpoints")
    source = root / layout.model
    final = load_file(root / f"final-{layout.name}.safetensors")
    assert sorted(final) == stored_tensor_names(source)
    check_weights(final, source, tmp_path)
    policy = tmp_path / "policy"
    (policy / "hf").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (policy / "hf" / name).write_bytes((source / name).read_bytes())
    (policy / "checkpoint").symlink_to(root / f"checkpoint-{layout.name}")
    merge_checkpoint(policy, tmp_path / "merged", "float32", 40_000)
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 1
    engine = alone(request, root, claims, layout).engine(load=False)
    engine.load_checkpoint(root / f"checkpoint-{layout.name}")
    merged = {
        name: tensor
        for file in (tmp_path / "merged").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    held = dict(engine.get_per_tensor_param())
    assert held.keys() == merged.keys()
    assert all(torch.equal(tensor.cpu(), merged[name]) for name, tensor in held.items())
    inferred = engine.infer_batch(without_mask(make_batch(0)))
    check_logprobs(inferred.logprobs_T.tolist(), tmp_path / "merged")
    collectives.close_process_group()


def test_parts_of_the_weights_lie_where_they_say(
    ranks: Callable[[int], RankResults], layout: Layout
) -> None:
    results = ranks(layout.world_size)
    ways = {
        "weights": [found_in(found, layout, "case_checkpoints")["shards"] for found in results],
        "adapted": [found_in(found, layout, "case_adapter").get("shards") for found in results],
        "fused": [found_in(found, layout, "case_shards") for found in results],
    }
    for way, shards in ways.items():
        if not shards[0]:
            continue
        assert all(rank["equal"] for rank in shards), way
        sizes = shards[0]["sizes"]
        owned = {name: sum(rank["owned"][name] for rank in shards) for name in sizes}
        assert owned == sizes, f"{way}: every value has one owner"
        # In orders that agree, so that every rank can send its own.
        places = [[WeightPlace.of(*values) for values in rank["places"]] for rank in shards]
        plan = make_plan(places, sizes, round_bytes=max(sizes.values()))
        assert sorted(name for each in plan.rounds for name in each.weights) == sorted(sizes), way


def test_a_number_that_is_not_finite_stops_every_rank(
    ranks: Callable[[int], RankResults], layout: Layout
) -> None:
    for results in ranks(layout.world_size):
        guards = found_in(results, layout, "case_guards")
        spoiled = {name: text for name, text in guards.items() if "=" in name}
        assert len(spoiled) == 6
        assert set(spoiled.values()) == {"NonFiniteError"}
        assert guards["unchanged"]
        assert "loss_mask is 0" in guards["empty_mask"]
        assert guards["after"] == found_in(results, layout, "case_trains")["plain"]


def test_a_value_model_trains(case: Case, root: Path, layout: Layout, tmp_path: Path) -> None:
    values = case(layout, "case_values")
    if not values:
        pytest.skip("needs a backend with a value model in this layout")
    steps = [*values["steps"], *values["continued"]]
    check_steps(steps, train_plainly(root / layout.model, value_model=True))
    for way, model in (("moe", "qwen3_moe"), ("compile", layout.model)):
        if way in values:
            check_steps(values[way], train_plainly(root / model, value_model=True))
    assert set(values["before"]) == {0.0}
    assert values["resumed"] == values["continued"]
    final = root / f"values-{layout.name}"
    written = written_model(root / layout.model, final, tmp_path)
    check_values(values["after"], values["last"], written)
    assert values["last_alone"] == pytest.approx(values["last"], abs=2e-6)
    assert values["masked"] == 0.0


def test_an_adapter_of_a_value_model_trains(
    case: Case, root: Path, layout: Layout, tmp_path: Path
) -> None:
    values = case(layout, "case_values").get("adapted")
    if not values:
        pytest.skip("needs a backend that adapts a value model in this layout")
    assert set(values["before"]) == {0.0}
    assert values["resumed"] == values["continued"]
    final = root / f"adapted-values-{layout.name}"
    written = written_model(root / layout.model, final, tmp_path)
    check_values(values["after"], values["last"], written)
    # The head is trained, and so is what stands before it.
    start = load_file(root / layout.model / "model.safetensors")
    end = load_file(final / "final.safetensors")
    changed = {
        name for name in start.keys() & end.keys() if not torch.equal(start[name], end[name])
    }
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)


def test_an_adapter_trains(case: Case, root: Path, layout: Layout, tmp_path: Path) -> None:
    adapter = case(layout, "case_adapter")
    if not adapter:
        pytest.skip("needs a backend with an adapter in this layout")
    assert adapter["start_minus_plain"] == 0.0
    assert adapter["off_minus_plain"] == 0.0
    assert adapter["on_again"] == adapter["after"]
    assert adapter["continued"][-1][0] < adapter["steps"][0][0] - 0.01
    assert adapter["resumed"] == adapter["continued"]
    assert adapter["merged_minus_adapted"] < 1e-5
    if (streamed := adapter.get("streamed")) is not None:
        assert streamed["difference"] < 1e-6
        assert streamed["names"]
        assert streamed["left_over"] == []
    written = written_model(root / layout.model, root / f"adapter-{layout.name}", tmp_path)
    assert stored_tensor_names(written) == stored_tensor_names(root / layout.model)
    check_logprobs(adapter["after"], written)
