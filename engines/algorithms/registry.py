"""The registries of algorithm parts: advantage estimators, policy losses, KL estimators.

Promises: a part is one pure function under one or more names, with its paper, the batch columns
it needs and the schema of its options; a name is registered once, a second time is refused; an
unknown name is a `ConfigError` that lists what exists and the nearest match.
Does not promise: that a part's module was imported; those of other people are, when their name is
asked for.
To add a part: one file with a decorated function, its import in the module that dispatches to it
(a static one: a stage's source digest follows those) and its line in `engines.config.plugins`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from torch import Tensor

from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.plugins import PluginKind, refuse_two_owners
from engines.errors import UnknownPluginError
from engines.types import TokenBatch
from infra.errors import ConfigError
from infra.names import unknown_name
from infra.plugins import load_outside, outside_plugins, unknown_plugin

PartFn = TypeVar("PartFn", bound=Callable[..., Any])


class NoOptions(StrictModel):
    """The schema of a part that has no options of its own."""


@dataclass(frozen=True)
class Part(Generic[PartFn]):
    """One registered part.

    Attributes:
        name: its first name; aliases lead to the same part.
        function: the pure function.
        paper: where the formula stands (arXiv id and section, or a title).
        columns: columns of the `TokenBatch` that the function reads, beside `loss_mask`.
        options: schema of the keys it takes from `AlgorithmConfig.options`.
        group_relative: compares samples of one prompt, so it needs two or more of them.
    """

    name: str
    function: PartFn
    paper: str
    columns: frozenset[str]
    options: type[StrictModel]
    group_relative: bool

    def own_options(self, options: Mapping[str, Any], path: str) -> StrictModel:
        """The part's share of the user's options, validated."""
        own = {key: value for key, value in options.items() if key in self.options.model_fields}
        return parse_options(own, [self.options], path)[0]


class Registry(Generic[PartFn]):
    """Parts of one kind by name.

    Args:
        kind: the configuration key that names a part; also the prefix of entry points.
    """

    def __init__(self, kind: PluginKind) -> None:
        self.kind: PluginKind = kind
        self._parts: dict[str, Part[PartFn]] = {}

    def register(
        self,
        *names: str,
        paper: str,
        columns: Sequence[str] = (),
        options: type[StrictModel] = NoOptions,
        group_relative: bool = False,
    ) -> Callable[[PartFn], PartFn]:
        """Decorator that registers a function under `names` and returns it unchanged.

        Args:
            *names: its name and aliases.
            paper: where the formula stands.
            columns: batch columns it reads, beside `loss_mask`.
            options: schema of its own options.
            group_relative: whether it compares samples of one prompt.

        Returns:
            The decorator.

        Raises:
            ValueError: no name was given, or one of them is taken.
        """
        if not names:
            raise ValueError(f"{self.kind}: register() needs a name")

        def decorate(function: PartFn) -> PartFn:
            taken = [name for name in names if name in self._parts]
            if taken:
                holder = self._parts[taken[0]].function
                raise ValueError(
                    f"{self.kind} {taken[0]!r} is already {holder.__module__}.{holder.__qualname__}"
                )
            part = Part(names[0], function, paper, frozenset(columns), options, group_relative)
            self._parts.update(dict.fromkeys(names, part))
            return function

        return decorate

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._parts)

    def get(self, name: str, path: str) -> Part[PartFn]:
        """The part of that name.

        Args:
            name: name or alias.
            path: where the user wrote it, for the error text.

        Returns:
            The registered part.

        Raises:
            UnknownPluginError: no such part; names the nearest one.
            ConfigError: two of other people have it, or theirs does not load.
        """
        if name not in self._parts:
            refuse_two_owners(self.kind, name, path)
            for plugin in outside_plugins(self.kind):
                if plugin.name == name:
                    load_outside(plugin, path)  # importing the module registers its parts here
        if name not in self._parts:
            raise UnknownPluginError(path, unknown_plugin(name, self.names()))
        return self._parts[name]


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator reads.

    Attributes:
        scores_B: (B,) float64 finite scores of the samples.
        group_index_B: (B,) int64 in [0, num_groups): which prompt each sample answers.
        num_groups: number of prompts. A group may have lost samples, or all of them.
        algorithm: the configuration, for the switches that estimators share.
        options: the estimator's own validated options.
    """

    scores_B: Tensor
    group_index_B: Tensor
    num_groups: int
    algorithm: AlgorithmConfig
    options: StrictModel


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss reads; all tensors (T,) float32, `logprobs_T` with gradient.

    Attributes:
        logprobs_T: of the policy being trained.
        old_logprobs_T: of the policy before the update, without gradient.
        advantages_T: the advantage of each token, without gradient.
        mask_T: bool, tokens that are trained on. Values elsewhere are ignored by the caller.
        batch: the packed batch, for losses that need sequences or columns of their own.
        algorithm: the configuration, for the switches that losses share.
        options: the loss's own validated options.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    batch: TokenBatch
    algorithm: AlgorithmConfig
    options: StrictModel


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss returns.

    Attributes:
        loss_T: (T,) loss of each token, with gradient, before aggregation.
        token_metrics: per-token values by metric name, (T,) each, reported as their mean over
            the trained tokens of the whole step.
    """

    loss_T: Tensor
    token_metrics: Mapping[str, Tensor]


AdvantageFn = Callable[[AdvantageInputs], Tensor]
PolicyLossFn = Callable[[PolicyLossInputs], TokenLoss]
KLFn = Callable[[Tensor, Tensor], Tensor]

ADVANTAGES: Registry[AdvantageFn] = Registry("adv_estimator")
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("loss_mode")
KL_ESTIMATORS: Registry[KLFn] = Registry("kl_loss_type")


def parse_options(
    options: Mapping[str, Any], schemas: Sequence[type[StrictModel]], path: str
) -> tuple[StrictModel, ...]:
    """Give each schema the keys that are its own; every key must belong to one of them.

    Args:
        options: what the user wrote.
        schemas: the schemas of the parts in use.
        path: where the options stand, for the error text.

    Returns:
        One validated object per schema, in their order.

    Raises:
        ConfigError: a key belongs to no schema, is missing, or has a bad value.
    """
    known = sorted({key for schema in schemas for key in schema.model_fields})
    for key in options:
        if key not in known:
            raise ConfigError(f"{path}.{key}", unknown_name(key, known))
    parsed: list[StrictModel] = []
    for schema in schemas:
        own = {key: value for key, value in options.items() if key in schema.model_fields}
        try:
            parsed.append(schema.model_validate(own))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([path, *(str(part) for part in first["loc"])])
            raise ConfigError(where, f"got {first.get('input')!r}; {first['msg']}") from error
    return tuple(parsed)
