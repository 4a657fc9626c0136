"""One table for each kind of part, by name. Imports no part and no torch.

A row names its class or function as ``module:attribute`` and holds what the plan must know before
imports. A new part of this project is one file and a row here, in `engines.config.backends`,
`engines.config.rows` or `hardware.platforms`. External parts come through `infra.plugins`: entry
points, or `register_plugin` from a module in RLHF_USE_EXTERNAL_MODULES.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from engines.config.backends import ENGINES
from engines.config.data import AUTO
from engines.config.rollout import RolloutConfig, RoutingName
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from hardware.platforms import PLATFORMS
from infra.errors import refuse
from infra.names import unknown_name
from infra.plugins import PluginTable, Row, register_row

RowT = TypeVar("RowT", bound=Row)
PluginKind = Literal[
    "platform",
    "backend",
    "rollout",
    "adv_estimator",
    "loss_mode",
    "kl_loss_type",
    "preference_loss",
    "reward",
    "preprocessor",
    "tracker",
]


IMAGES = "images"
STRUCTURED_OUTPUT = "structured_output"
"""Capabilities of a rollout engine; see `engines.rollout.base.Capability`."""


@dataclass(frozen=True, kw_only=True)
class RewardRow(Row):
    """A reward function.

    Attributes:
        in_process: it is pure, fast and cannot hang, so it needs no process of its own.
        memory_limit_bytes: address space of its process; None sets no limit.
        reads: field of `rl.reward` with the model whose output it reads; None: no model.
        is_verdict: it decides if an answer is correct, by its `acc` or a score of 1 or more.
        compares: it needs a ground truth; a sample without one is unscored.
    """

    in_process: bool = False
    memory_limit_bytes: int | None = None
    reads: Literal["model", "judge"] | None = None
    is_verdict: bool = True
    compares: bool = False

    @property
    def counted(self) -> str:
        """Text of the row for the fingerprint; a sample above the memory limit is unscored."""
        return f"{self.target} {self.memory_limit_bytes}"


@dataclass(frozen=True, kw_only=True)
class RolloutRow(Row):
    """A rollout engine.

    Attributes:
        routing: `by_place` if the batch changes the last bits of an engine's results.
        capabilities: values of `engines.rollout.base.Capability`; some need options or a platform.
        num_spare_tokens: context that must stay free when logprobs of a sequence are asked for.
        refuses_model: ``module:function``, importable without torch, that gets a model's text
            configuration (`config.json`) and returns what the engine lacks for it, or None.
    """

    routing: RoutingName = "by_place"
    capabilities: tuple[str, ...] = ()
    num_spare_tokens: int = 0
    refuses_model: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutRow(Row):
    """A layout of raw rows.

    Attributes:
        recognised: `auto` may choose it; it has columns of its own and needs no option.
        ground_truth: its RL rows have one.
    """

    recognised: bool = False
    images: bool = False
    ground_truth: bool = True


ROLLOUT_ENGINES = PluginTable(
    "rollout",
    "rollout.engine",
    [
        RolloutRow(
            name="transformers",
            target="engines.rollout.transformers.engine:TransformersEngine",
            options="engines.rollout.transformers.options:TransformersOptions",
            capabilities=(
                "sleep_frees_memory",
                "exact_continuation",
                "prompt_logprobs",
                "prompt_logprobs_at_any_temperature",
                "images",
            ),
            refuses_model="engines.rollout.transformers.options:refusal",
        ),
        RolloutRow(
            name="sglang",
            target="engines.rollout.sglang.engine:SglangEngine",
            requires="sglang",
            environment="sglang",
            options="engines.rollout.sglang.options:SglangOptions",
            routing="least_loaded",
            capabilities=(
                "prefix_cache",
                "sleep_frees_memory",
                "exact_continuation",
                "structured_output",
                "shared_memory",
                "prompt_logprobs",
            ),
            num_spare_tokens=1,
        ),
        RolloutRow(
            name="vllm",
            target="engines.rollout.vllm.engine:VllmEngine",
            requires="vllm",
            environment="vllm",
            options="engines.rollout.vllm.options:VllmOptions",
            routing="least_loaded",
            capabilities=(
                "prefix_cache",
                "sleep_frees_memory",
                "structured_output",
                "shared_memory",
                "adapters",
                "prompt_logprobs",
                "fp8",
            ),
            num_spare_tokens=1,
        ),
    ],
    RolloutRow,
)

REWARDS = PluginTable(
    "reward",
    "rl.reward.function",
    [
        RewardRow(
            name="exact",
            target="engines.rewards.text_rules:exact",
            options="engines.rewards.options:ExactOptions",
            in_process=True,
            compares=True,
        ),
        RewardRow(
            name="math",
            target="engines.rewards.math:compute_score",
            options="engines.rewards.options:MathOptions",
            # A power tower in an answer must raise MemoryError, not exhaust the machine.
            memory_limit_bytes=4 * 2**30,
            compares=True,
        ),
        RewardRow(
            name="format",
            target="engines.rewards.text_rules:required_form",
            options="engines.rewards.options:FormatOptions",
            is_verdict=False,
        ),
        RewardRow(
            name="length",
            target="engines.rewards.text_rules:length",
            options="engines.rewards.options:LengthOptions",
            is_verdict=False,
            in_process=True,
        ),
        RewardRow(
            name="gsm8k",
            target="engines.rewards.text_rules:gsm8k",
            options="engines.rewards.options:Gsm8kOptions",
            in_process=True,
            compares=True,
        ),
        RewardRow(
            name="math_boxed",
            target="engines.rewards.text_rules:math_boxed",
            in_process=True,
            compares=True,
        ),
        RewardRow(
            name="math_dapo",
            target="engines.rewards.text_rules:math_dapo",
            options="engines.rewards.options:MathDapoOptions",
            in_process=True,
            compares=True,
        ),
        RewardRow(
            name="http",
            target="engines.rewards.http:compute_score",
            options="engines.rewards.options:HttpOptions",
        ),
        RewardRow(
            name="model",
            target="engines.judges.judgement:model_score",
            options="engines.rewards.options:ModelOptions",
            in_process=True,
            reads="model",
        ),
        RewardRow(
            name="judge",
            target="engines.judges.judgement:judge_score",
            # A user's regular expression may never finish.
            options="engines.rewards.options:JudgeOptions",
            reads="judge",
        ),
        RewardRow(name="mixture", target="engines.rewards.resolve:mixture"),
    ],
    RewardRow,
    other_forms=("path/to/file.py:name",),
)

_LAYOUTS = "engines.data.prepare.preprocessors"
PREPROCESSORS = PluginTable(
    "preprocessor",
    "data.*.format",
    [
        LayoutRow(
            name="rows",
            target=f"{_LAYOUTS}.row_schema:RowSchema",
            recognised=True,
        ),
        LayoutRow(
            name="messages",
            target=f"{_LAYOUTS}.row_schema:Conversations",
            recognised=True,
        ),
        LayoutRow(
            name="sharegpt",
            target=f"{_LAYOUTS}.sharegpt:ShareGPT",
            options=f"{_LAYOUTS}.sharegpt:ShareGPTOptions",
            recognised=True,
        ),
        LayoutRow(
            name="alpaca",
            target=f"{_LAYOUTS}.alpaca:Alpaca",
            options=f"{_LAYOUTS}.alpaca:AlpacaOptions",
            recognised=True,
        ),
        LayoutRow(
            name="pairs",
            target=f"{_LAYOUTS}.row_schema:Pairs",
            options=f"{_LAYOUTS}.row_schema:PairsOptions",
            recognised=True,
            ground_truth=False,
        ),
        LayoutRow(
            name="hh_rlhf",
            target=f"{_LAYOUTS}.hh_rlhf:HHRLHF",
            options=f"{_LAYOUTS}.hh_rlhf:HHRLHFOptions",
            recognised=True,
            ground_truth=False,
        ),
        LayoutRow(
            name="ultrafeedback",
            target=f"{_LAYOUTS}.ultrafeedback:UltraFeedback",
            options=f"{_LAYOUTS}.ultrafeedback:UltraFeedbackOptions",
            recognised=True,
            ground_truth=False,
        ),
        LayoutRow(
            name="columns",
            target=f"{_LAYOUTS}.columns:Columns",
            options=f"{_LAYOUTS}.columns:ColumnsOptions",
            recognised=True,
        ),
        LayoutRow(
            name="gsm8k",
            target=f"{_LAYOUTS}.gsm8k:GSM8K",
            options=f"{_LAYOUTS}.gsm8k:GSM8KOptions",
            recognised=True,
        ),
        LayoutRow(
            name="math",
            target=f"{_LAYOUTS}.math:MATH",
            options=f"{_LAYOUTS}.math:MATHOptions",
            recognised=True,
        ),
        LayoutRow(
            name="openr1_math",
            target=f"{_LAYOUTS}.openr1_math:OpenR1Math",
            options=f"{_LAYOUTS}.openr1_math:OpenR1MathOptions",
            recognised=True,
        ),
        LayoutRow(
            name="geometry3k",
            target=f"{_LAYOUTS}.geometry3k:Geometry3k",
            options=f"{_LAYOUTS}.geometry3k:Geometry3kOptions",
            recognised=True,
            images=True,
        ),
        LayoutRow(
            name="xlam",
            target=f"{_LAYOUTS}.xlam:XLAM",
            options=f"{_LAYOUTS}.xlam:XLAMOptions",
            recognised=True,
        ),
        LayoutRow(
            name="dapo_math_17k",
            target=f"{_LAYOUTS}.dapo_math_17k:DAPOMath17k",
            options=f"{_LAYOUTS}.dapo_math_17k:DAPOMath17kOptions",
        ),
    ],
    LayoutRow,
    other_forms=(AUTO,),
)

TRACKERS = PluginTable(
    "tracker",
    "location.tracker",
    [
        Row(name="mlflow", target="infra.tracking.mlflow_tracker:MlflowTracker"),
        Row(
            name="tensorboard",
            target="infra.tracking.mirrors.tensorboard_tracker:TensorBoardTracker",
            requires="tensorboard",
            extra="tensorboard",
        ),
        Row(
            name="wandb",
            target="infra.tracking.mirrors.wandb_tracker:WandbTracker",
            requires="wandb",
            extra="wandb",
        ),
    ],
    Row,
)

TABLES: Mapping[PluginKind, PluginTable[Any]] = {
    "platform": PLATFORMS,
    "backend": ENGINES,
    "rollout": ROLLOUT_ENGINES,
    "adv_estimator": ADVANTAGES,
    "loss_mode": POLICY_LOSSES,
    "kl_loss_type": KL_ESTIMATORS,
    "preference_loss": PREFERENCE_LOSSES,
    "reward": REWARDS,
    "preprocessor": PREPROCESSORS,
    "tracker": TRACKERS,
}


def register_plugin(kind: PluginKind, name: str, target: str, **facts: Any) -> None:
    """Register a part in this process; for modules of RLHF_USE_EXTERNAL_MODULES.

    The control plane imports those modules too: they may import this module, but not torch.

    Args:
        name: name in the configuration; a backend's value model is ``<name>.value_model``.
        target: ``module:attribute``, imported on first use.
        **facts: fields of the table's row (`options`, `group_relative`, ...). `devices` and
            `vendor` add an engine for one device or vendor to the name of a built-in backend.

    Raises:
        ConfigError: unknown kind or fact, malformed `target`, `devices` of something else than a
            training engine, or `vendor` without `devices`. First use refuses a duplicate name.
    """
    path = f"plugin {kind}.{name}"
    refuse(kind not in TABLES, path, unknown_name(kind, get_args(PluginKind)))
    row_type = TABLES[kind].row_type
    known = {each.name for each in fields(row_type)} - {"owner", "registrar"}
    for fact in facts:
        refuse(
            fact not in known, path, f"{kind} has no such fact: {unknown_name(fact, sorted(known))}"
        )
    register_row(kind, row_type(name=name, target=target, **facts))


def all_rows(table: PluginTable[RowT]) -> tuple[RowT, ...]:
    """Return the rows of a table; those of external plugins come last."""
    return (*table.rows, *table.outside())


def recognised_layouts() -> list[str]:
    """Return the layouts that `auto` recognises; those of external plugins come last."""
    return [row.name for row in all_rows(PREPROCESSORS) if row.recognised]


def engines_with(capability: str) -> list[str]:
    """Return the sorted rollout engines with a capability."""
    return sorted({row.name for row in all_rows(ROLLOUT_ENGINES) if capability in row.capabilities})


def named_rows(
    named: Iterable[tuple[PluginKind, str]], device: str | None = None
) -> tuple[Row, ...]:
    """Return the rows of the named parts; unknown names have none. `device` None: every device."""
    rows = (
        row
        for kind, name in named
        for row in all_rows(TABLES[kind])
        if row.name == name and (device is None or not row.devices or device in row.devices)
    )
    return tuple(dict.fromkeys(rows))


def plugin_modules(
    named: Iterable[tuple[PluginKind, str]], device: str | None = None
) -> tuple[str, ...]:
    """Return the sorted modules that affect the named parts, including those that register one."""
    return tuple(sorted({name for row in named_rows(named, device) for name in row.modules}))


def is_embedded(rollout: RolloutConfig) -> bool:
    """Return True if the engine runs in the process that uses it: colocated, no own environment."""
    return (
        rollout.placement == "colocated"
        and ROLLOUT_ENGINES.place(rollout.engine).environment is None
    )
