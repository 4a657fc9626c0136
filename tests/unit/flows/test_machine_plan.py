"""`rlhf plan --on`, its suggestions, and the refusal of what this machine cannot hold."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.cost.machines import Machine, machine_of
from engines.cost.phase_bytes import PhaseBytes
from engines.cost.stage_cost import PhaseCost, StageCost
from flows.commands.cli import main
from flows.first_change import Change, CostsOf, first_change
from flows.machine_plan import (
    as_json,
    costs_on,
    device_shortage,
    lines_of,
    plan_on,
    resolved_on,
)
from flows.recipe.recipe import Recipe, load_recipe
from flows.recipe.source import RECIPES_DIR, shipped_names
from infra.errors import ConfigError
from infra.plugins import assumed_installed
from infra.survey_report import FoundPlatform

PUBLISHED = [name for name in shipped_names(RECIPES_DIR) if "_" in name and name[-1] == "b"]
H100 = FoundPlatform(
    name="nvidia", device="cuda", reason="here", label="NVIDIA H100 80GB HBM3", num_devices=1,
    memory_bytes=84_932_978_278,
)  # fmt: skip


def recipe_of(name: str, *overrides: str) -> Recipe:
    with assumed_installed():
        return load_recipe(name, overrides)


def change_of(recipe: Recipe, name: str) -> Change | None:
    with assumed_installed():
        return first_change(recipe, machine_of(name), costs_on)


def test_every_published_recipe_is_planned() -> None:
    assert len(PUBLISHED) == 19
    for name in PUBLISHED:
        recipe = recipe_of(name)
        assert recipe.model.path
        own = machine_of(f"h100x{max(8, recipe.training.num_workers)}")
        plan = plan_on(recipe, own)
        # Mixtral's engines need several devices each.
        assert plan.fits == (name != "rloo_mixtral_8x22b"), name
        assert plan.fits or plan.change, name


def costs_if(*wanted: Callable[[Recipe, Machine], bool]) -> CostsOf:
    """Costs of a recipe that fits if all is as wanted; each missing part is a byte too much."""

    def costs_of(recipe: Recipe, on: Machine) -> tuple[StageCost, ...]:
        need = sum(not each(recipe, on) for each in wanted)
        phase = PhaseCost("train", "rank", PhaseBytes(saved_bytes=need), room_bytes=0)
        return (StageCost(("sft",), (phase,), 1, 0, ()),)

    return costs_of


TOKENS, CHECKPOINTING = "max_tokens_per_micro_batch", "gradient_checkpointing"
ORDER: list[tuple[Callable[[Recipe, Machine], bool], list[str]]] = [
    (lambda r, m: r.training.max_tokens_per_micro_batch < 16384, [f"training.{TOKENS}=8192"]),
    (lambda r, m: r.training.max_tokens_per_micro_batch < 3000, [f"training.{TOKENS}=2048"]),
    (lambda r, m: r.training.gradient_checkpointing is True, [f"training.{CHECKPOINTING}=true"]),
    (lambda r, m: r.training.optimizer_offload, ["training.optimizer_offload=true"]),
    (lambda r, m: r.training.param_offload, ["training.param_offload=true"]),
    (lambda r, m: r.training.param_offload and r.training.optimizer_offload,
     ["training.optimizer_offload=true", "training.param_offload=true"]),
    (lambda r, m: r.training.lora is not None, ["training.lora.rank=16"]),
    (lambda r, m: r.training.replicate_size == 1, ["training.replicate_size=1"]),
    (lambda r, m: r.training.ulysses_size == 2,
     ["training.ulysses_size=2", f"training.{TOKENS}=8192", "training.num_workers=4"]),
    (lambda r, m: m.num_devices == 16 and r.training.num_workers == 8,
     ["training.num_workers=8"]),
]  # fmt: skip


@pytest.mark.parametrize(("fits", "expected"), ORDER)
def test_one_change(fits: Callable[[Recipe, Machine], bool], expected: list[str]) -> None:
    recipe = recipe_of(
        "sft_llama_7b", "training.num_workers=4", "training.replicate_size=2",
        "training.gradient_checkpointing=false", "training.max_tokens_per_micro_batch=16384",
    )  # fmt: skip
    found = first_change(recipe, machine_of("h100x8"), costs_if(fits))
    assert found is not None
    assert found.arguments == expected


def test_earlier_changes_come_first() -> None:
    recipe = recipe_of("sft_llama_7b", "training.gradient_checkpointing=false")
    left = [
        lambda r: r.training.max_tokens_per_micro_batch < 16384,
        lambda r: r.training.gradient_checkpointing,
        lambda r: r.training.optimizer_offload,
        lambda r: r.training.lora is not None,
        lambda r: r.training.ulysses_size > 1,
    ]
    names = ["max_tokens", "gradient_checkpointing", "optimizer_offload", "lora", "ulysses"]
    for index, name in enumerate(names):
        fits = costs_if(lambda r, m, at=index: any(each(r) for each in left[at:]))
        found = first_change(recipe, machine_of("h100x8"), fits)
        assert found is not None
        assert name in found.arguments[0]


def test_changes_add_up() -> None:
    recipe = recipe_of("sft_llama_7b", "training.gradient_checkpointing=false")
    wanted = [
        lambda r, m: r.training.max_tokens_per_micro_batch <= 8192,
        lambda r, m: r.training.optimizer_offload,
        lambda r, m: r.training.lora is not None,
    ]
    found = first_change(recipe, machine_of("h100x8"), costs_if(*wanted))
    assert found is not None
    assert found.arguments == [
        "training.max_tokens_per_micro_batch=8192",
        "training.optimizer_offload=true",
        "training.lora.rank=16",
    ]


def test_nothing_may_fit() -> None:
    recipe = recipe_of("sft_llama_7b")
    assert first_change(recipe, machine_of("h100x8"), costs_if(lambda r, m: False)) is None


def test_a_recipe_for_more_devices_is_put_on_those() -> None:
    recipe = recipe_of("gspo_qwen3_30b_a3b")
    found = change_of(recipe, "h100x8")
    assert found is not None
    assert found.arguments == ["training.num_workers=8"]
    # Weights and gradients of 30.5 B in float32 over eight; the moments come in parts.
    state = max(each.state_bytes for each in found.costs)
    assert state / 1e9 == pytest.approx(30.5 + 0.8, abs=0.1)
    one = change_of(recipe, "h200x1")
    assert one is not None
    assert "training.lora.rank=16" in one.arguments
    assert one.machine.num_devices == 1


def test_a_change_fits_when_it_is_set() -> None:
    for name in ("rm_ppo_llama3_8b", "dpo_zephyr_7b", "remax_qwen2.5_7b"):
        found = change_of(recipe_of(name), "a100x1")
        assert found is not None
        again = plan_on(recipe_of(name, *found.arguments), found.machine)
        assert again.fits
        assert again.costs == found.costs


def test_a_colocated_engine_takes_less() -> None:
    recipe = recipe_of("remax_qwen2.5_7b", "rollout.engine=vllm")
    found = change_of(recipe, "h100x8")
    assert found is not None
    assert found.arguments == ["rollout.options.gpu_memory_utilization=0.7"]


def test_what_a_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sft_llama_7b", "--on", "h100x8"]) == 0
    printed = capsys.readouterr().out
    plan = plan_on(recipe_of("sft_llama_7b"), machine_of("h100x8"))
    assert printed.splitlines() == [*lines_of(plan)]
    assert printed.splitlines()[0] == "sft"
    assert "parameter 3.4, gradient 3.4, moment 6.7" in printed
    assert printed.rstrip().endswith("on h100x8: fits")
    assert "evaluate_sft and 1 more alike" in printed


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sft_llama_7b", "--on", "a100x4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(
        json.dumps(as_json(plan_on(recipe_of("sft_llama_7b"), machine_of("a100x4"))))
    )
    assert (found["fits"], found["machine"]["num_devices"]) == (False, 4)
    assert found["change"] == {"settings": ["training.num_workers=4"], "machine": "a100x4"}
    assert found["stages"][0]["problem"] == "needs 8 devices; a100x4 has 4"


def test_auto_is_what_an_accelerator_takes() -> None:
    auto = ("training.dtype=auto", "training.gradient_checkpointing=auto")
    taken = (
        "training.dtype=bfloat16", "training.gradient_checkpointing=true",
        "training.use_torch_compile=true",
    )  # fmt: skip
    plans = [
        plan_on(recipe_of("sft_llama_7b", *each), machine_of("h100x8")) for each in (auto, taken)
    ]
    assert plans[0].costs == plans[1].costs


def without_recomputation(name: str, on: str, *overrides: str) -> tuple[bool | str, str]:
    """What `auto` became, and the reason that the plan gives."""
    recipe, machine = recipe_of(name, *overrides), machine_of(on)
    with assumed_installed():
        resolved, reasons = resolved_on(recipe, machine)
    assert set(reasons) <= set(plan_on(recipe, machine).notes)
    return resolved.training.gradient_checkpointing, "; ".join(reasons)


def test_layers_are_recomputed_only_without_room() -> None:
    keeps, why = without_recomputation("gsm8k_qwen2.5_0.5b", "h200x1")
    assert keeps is False
    assert re.search(r"checkpointing is off: without it training needs [0-9.]+ GB, and 126", why)
    recomputes, why = without_recomputation("sft_llama_7b", "a100x8")
    assert recomputes is True
    assert "training.gradient_checkpointing is on: without it training needs" in why
    for choice in (True, False):
        override = f"training.gradient_checkpointing={choice}"
        assert without_recomputation("sft_llama_7b", "a100x8", override) == (choice, "")


def test_room_without_recomputation_has_a_margin() -> None:
    """A tenth of the device, beside what the cost model keeps free by itself."""
    recipe = recipe_of("gsm8k_qwen2.5_0.5b", "training.gradient_checkpointing=false")
    machine = machine_of("h200x1")
    phases = [phase for cost in costs_on(recipe, machine) for phase in cost.phases]
    needed = max(each.bytes.total_bytes for each in phases if each.phase == "train")
    reserved = max(0.95 * machine.memory_bytes - each.room_bytes for each in phases)
    asked = recipe_of("gsm8k_qwen2.5_0.5b")
    for share, expected in ((0.84, False), (0.86, True)):
        small = machine.model_copy(update={"memory_bytes": int((needed + reserved) / share)})
        assert costs_on(recipe, small)[0].fits
        with assumed_installed():
            resolved, _ = resolved_on(asked, small)
        assert resolved.training.gradient_checkpointing is expected


def test_what_cannot_be_counted_is_recomputed() -> None:
    _, why = without_recomputation("sft_llama_7b", "h100x8", "training.backend=megatron")
    assert "training.use_torch_compile is off: megatron compiles no layers" in why
    sees_images = [n for n in shipped_names(RECIPES_DIR) if "_vl_" in n]
    assert sees_images
    for name in sees_images:
        found = without_recomputation(name, "b200x8")
        assert found[0] is True
        assert found[1].endswith("what training keeps without it is not wholly counted")


def test_another_vendor_is_told() -> None:
    plan = plan_on(recipe_of("sft_llama_7b"), machine_of("mi300x8"))
    assert plan.fits
    assert "hardware.platform is nvidia; set it to amd there" in plan.notes


def test_a_model_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = recipe_of("sft_llama_7b", "model.path=owner/absent")
    with pytest.raises(ConfigError, match=r"model.path: got owner/absent, whose config.json"):
        plan_on(recipe, machine_of("h100x8"))


def test_a_model_directory_without_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    recipe = recipe_of("sft_llama_7b", f"model.path={tmp_path}")
    with pytest.raises(ConfigError, match=r"model.path: .*hidden_size: got None in config.json"):
        plan_on(recipe, machine_of("h100x8"))


def test_planning_needs_neither_torch_nor_a_home(tmp_path: Path) -> None:
    code = (
        "import sys; from flows.commands.cli import main; "
        "main(['plan', 'dapo_qwen2.5_32b', '--on', 'h100x128', '--set', 'rollout.engine=vllm']); "
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RLHF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "dapo-qwen2.5-32b" in ended.stdout
    assert not (tmp_path / "home").exists()


def test_a_device_too_small_for_the_state(tmp_path: Path) -> None:
    recipe = recipe_of("sft_llama_7b", "training.num_workers=1")
    assert device_shortage(recipe, H100) == (
        "sft needs 107.8 GB on each rank for weights, gradients and moments, NVIDIA H100 80GB HBM3 "
        "has 84.9 GB; set training.optimizer_offload=true"
    )
    assert not device_shortage(recipe_of("gsm8k_qwen2.5_0.5b"), H100)
    # Saved tensors alone are not enough for a refusal: settings may change them.
    wide = ("training.max_tokens_per_micro_batch=1000000", "training.gradient_checkpointing=false")
    assert not device_shortage(recipe_of("gsm8k_qwen2.5_0.5b", *wide), H100)
    assert not device_shortage(recipe, H100.model_copy(update={"memory_bytes": None}))
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    uncounted = recipe_of("sft_llama_7b", "training.num_workers=1", f"model.path={tmp_path}")
    assert not device_shortage(uncounted, H100)
