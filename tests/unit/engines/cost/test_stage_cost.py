"""Costs of whole stages: which models they hold, where, and on which devices."""

from typing import Any

import pytest

from engines.cost.machines import Machine, machine_of
from engines.cost.model_config import shapes_of
from engines.cost.stage_cost import FREE_SHARE, PROCESS_BYTES, StageCost, stage_costs
from engines.cost.workload import Workload, workload_of
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import stages_of
from infra.plugins import assumed_installed

H100X8 = machine_of("h100x8")


def recipe_of(name: str, *overrides: str) -> Recipe:
    with assumed_installed():
        return load_recipe(name, overrides)


def costs_of(recipe: Recipe, machine: Machine = H100X8) -> dict[str, StageCost]:
    assert recipe.data is not None
    with assumed_installed():
        found = stage_costs(
            stages_of(recipe), recipe.data.max_prompt_length, shapes_of(recipe), machine
        )
    return {label: cost for cost in found for label in cost.labels}


def work_of(recipe: Recipe, label: str) -> Workload:
    stage = next(each for each in stages_of(recipe) if each.label == label)
    found = workload_of(stage, 512, shapes_of(recipe))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "label", "roles"),
    [
        ("sft_llama_7b", "sft", ["policy"]),
        ("dpo_zephyr_7b", "preference", ["policy", "reference"]),
        ("kto_zephyr_7b", "preference", ["policy", "reference"]),
        ("rm_ppo_llama3_8b", "reward_model", ["policy"]),
        ("rm_ppo_llama3_8b", "rl_round_1", ["policy", "critic", "reference", "reward"]),
        ("distill_qwen3_8b", "rl_round_1", ["policy", "teacher"]),
        ("dapo_qwen2.5_32b", "rl_round_1", ["policy"]),
        ("vapo_qwen2.5_32b", "rl_round_1", ["policy", "critic"]),
        ("lora_grpo_qwen2.5_0.5b", "rl_round_1", ["policy"]),  # its base is the reference
    ],
)
def test_models_of_a_stage(name: str, label: str, roles: list[str]) -> None:
    assert [each.role for each in work_of(recipe_of(name), label).roles] == roles


def test_passes_of_a_round() -> None:
    # Several updates of a batch read logprobs of the policy before them.
    several = work_of(recipe_of("gsm8k_qwen2.5_0.5b"), "rl_round_1")
    assert [(r.num_passes, r.num_trained) for r in several.roles] == [(1, 1), (1, 0)]
    assert (several.num_sequences, several.num_updates) == (512, 2)
    once = recipe_of("gsm8k_qwen2.5_0.5b", "rl.mini_batch_size_prompts=null", "rl.num_epochs=1")
    assert work_of(once, "rl_round_1").roles[0].num_passes == 0
    twice = recipe_of("gsm8k_qwen2.5_0.5b", "rl.num_epochs=2")
    assert work_of(twice, "rl_round_1").roles[0].num_trained == 2


def test_pairs_stay_together() -> None:
    pairs = work_of(recipe_of("dpo_zephyr_7b"), "preference")
    single = work_of(recipe_of("kto_zephyr_7b"), "preference")
    assert (pairs.unit_tokens, single.unit_tokens) == (2048, 1024)
    assert pairs.num_sequences == single.num_sequences == 256


def test_equal_stages_are_one() -> None:
    recipe = recipe_of("gsm8k_qwen2.5_0.5b")
    found = {cost.labels for cost in costs_of(recipe).values()}
    assert [len(labels) for labels in sorted(found)] == [7, 5, 1]


def test_a_colocated_process_needs_its_context() -> None:
    embedded = costs_of(recipe_of("sft_llama_7b"))["sft"].phases[0]
    assert embedded.room_bytes == int(H100X8.memory_bytes * (1 - FREE_SHARE)) - PROCESS_BYTES
    served = costs_of(recipe_of("remax_qwen2.5_7b", "rollout.engine=vllm"))["rl_round_1"]
    train, sync, sample = served.phases
    assert train.room_bytes == embedded.room_bytes - PROCESS_BYTES
    assert sample.bytes.engine_bytes + sample.bytes.cache_bytes == int(0.9 * H100X8.memory_bytes)
    assert sync.bytes.cache_bytes == 0
    assert not sample.fits  # the optimizer's moments stay beside the engine
    assert served.num_devices == 8


def test_disaggregated_engines_have_their_own_devices() -> None:
    recipe = recipe_of(
        "remax_qwen2.5_7b", "rollout.engine=vllm", "rollout.placement=disaggregated",
        "rollout.num_replicas=2", "rollout.options.tensor_parallel_size=2",
        "training.num_workers=4",
    )  # fmt: skip
    found = costs_of(recipe)["rl_round_1"]
    assert [(p.phase, p.place) for p in found.phases] == [
        ("train", "rank"), ("sync", "rank"), ("sample", "engine"),
    ]  # fmt: skip
    assert (found.num_devices, found.fits) == (8, True)
    train, sync, sample = found.phases
    assert sync.bytes.engine_bytes == train.bytes.engine_bytes == 0
    assert sample.bytes.parameter_bytes == sample.bytes.moment_bytes == 0
    few = costs_of(recipe, machine_of("h100x4"))["rl_round_1"]
    assert (few.problem, few.fits) == ("needs 8 devices; h100x4 has 4", False)


def test_offloads_need_host_memory() -> None:
    overrides = ("training.num_workers=8", "training.ulysses_size=4", "training.lora=null")
    recipe = recipe_of("dapo_qwen2.5_32b", *overrides)
    small = H100X8.model_copy(update={"host_memory_bytes": 10**11})
    assert "offloads 393 GB" in costs_of(recipe, small)["rl_round_1"].problem
    assert not costs_of(recipe)["rl_round_1"].problem


def test_models_made_from_scratch() -> None:
    found: Any = costs_of(recipe_of("quickstart"))["rl_round_1"]
    assert found.fits
    assert found.state_bytes < 10**9
