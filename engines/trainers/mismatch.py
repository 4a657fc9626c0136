"""Guards against samples from other weights: versions, logprob differences, a probe after a sync.

Stale weights, another sampling distribution and numerical drift all show as a difference between
the sampler's and the trainer's logprobs. The training pass measures it at no extra cost; a step
without a policy update takes an extra pass, because a broken sampler may score nothing. After a
weight sync each engine also answers a fixed prompt, longer than a cache block: digests prove only
which bytes arrived, while packed copies of a head or a prefix cache may be stale.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from engines.algorithms.aggregation import token_mean
from engines.algorithms.parts import Gather
from engines.algorithms.policy_objective import Objective
from engines.config.algorithm import MismatchConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.publishing import Probe
from engines.types import (
    Completion,
    GlobalCounts,
    LossOutput,
    ModelOutputs,
    Readouts,
    RolloutRequest,
    SamplingParams,
    TokenBatch,
)

LOGPROB_MEAN = "mismatch/logprob_abs_mean"
LOGPROB_MAX = "mismatch/logprob_abs_max"

BOUNDS = {"float32": (1e-4, 1e-2), "bfloat16": (0.1, 10.0), "fp8": (0.5, 20.0)}
"""Bounds of mean and maximum in nats, by the coarser dtype of sampler and trainer. In float32 the
engines agree to about 1e-6. A bfloat16 has 8 significant bits, so rounding moves a logit of 20 by
up to 0.06 in each engine: in healthy runs single tokens differ by nats, the mean by hundredths.
An E4M3 has 4 significant bits, so a layer's outputs are off by some hundredths of their size.
"""


@dataclass(frozen=True)
class MeasuredObjective:
    """A policy objective that also reports the difference between sampler and trainer."""

    objective: Objective

    @property
    def readouts(self) -> Readouts:
        """Readouts of the objective."""
        return self.objective.readouts

    def extras(self, batch: TokenBatch, gather: Gather) -> Mapping[str, float]:
        """Return the objective's extras."""
        return self.objective.extras(batch, gather)

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return the objective's loss, with the metrics of `differences` added to its own."""
        output = self.objective(outputs, batch, counts)
        means, maxima = differences(
            batch.columns.get("old_logprobs", outputs.logprobs_T.detach()), batch, counts
        )
        return LossOutput(output.loss, {**output.metrics, **means}, {**output.maxima, **maxima})


def differences(
    logprobs_T: Tensor, batch: TokenBatch, counts: GlobalCounts
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return means and maxima of the differences between sampler and trainer over sampled tokens.

    `mismatch/logprob_abs_*` compares logprobs, verl's `training/rollout_probs_diff_*`
    probabilities. Means are shares to be summed over micro-batches and ranks.
    """
    mask_T, rollout_T = batch.columns["loss_mask"] > 0, batch.columns["rollout_logprobs"]
    means, maxima = {}, {}
    for name, difference_T in (
        ("mismatch/logprob_abs", (logprobs_T - rollout_T).abs()),
        ("training/rollout_probs_diff", (logprobs_T.exp() - rollout_T.exp()).abs()),
    ):
        means[f"{name}_mean"] = token_mean(difference_T, mask_T, counts)
        maxima[f"{name}_max"] = torch.where(mask_T, difference_T, 0.0).amax()
    return means, maxima


def untrained_differences(logprobs_T: Tensor, batch: TokenBatch) -> dict[str, float]:
    """Return `differences` of a whole batch, for a step without a policy update."""
    counts = GlobalCounts(int((batch.columns["loss_mask"] > 0).sum()), batch.num_sequences)
    means, maxima = differences(logprobs_T, batch, counts)
    return {name: float(value) for name, value in (means | maxima).items()}


@dataclass(frozen=True)
class MismatchGate:
    """Bounds in nats of the mean and maximum |rollout logprob - training logprob| of a step."""

    mean: float
    max: float

    @staticmethod
    def of(config: MismatchConfig, *dtypes: str) -> "MismatchGate":
        """Return the configured bounds, else those of the coarsest dtype; infinite if disabled."""
        if not config.enable:
            return MismatchGate(math.inf, math.inf)
        mean, largest = max(BOUNDS[dtype] for dtype in dtypes)
        return MismatchGate(config.mean or mean, config.max or largest)

    def check(self, found: Sequence[Mapping[str, float]]) -> None:
        """Raise `WeightSyncError` if a difference of a step exceeds a bound or is not finite."""
        means = [metrics[LOGPROB_MEAN] for metrics in found]
        maxima = [metrics[LOGPROB_MAX] for metrics in found]
        for name, values, value, bound, field in (
            (LOGPROB_MEAN, means, sum(means) / max(1, len(means)), self.mean, "mean"),
            (LOGPROB_MAX, maxima, max(maxima, default=0.0), self.max, "max"),
        ):
            wrong = [value for value in values if not math.isfinite(value)]
            if wrong or value > bound:
                raise WeightSyncError(
                    f"{name} is {[*wrong, value][0]:.3g}, above rl.mismatch.{field} {bound:.3g}: "
                    "the rollout engine does not sample from the distribution that is trained"
                )


def check_versions(completions: Sequence[Sequence[Completion]], version: int) -> None:
    """Raise `RolloutError` unless the published version is known to have sampled all tokens."""
    for completion in chain.from_iterable(completions):
        versions = {sampled for sampled, _ in completion.tokens.version_runs}
        if versions - {version} or (len(completion.token_ids) and not versions):
            raise RolloutError(
                f"{completion.request_id} sample {completion.sample_index}: "
                f"{len(completion.token_ids)} tokens of versions {sorted(versions)}, "
                f"published is {version}; its samples cannot be trained on as on-policy"
            )


NUM_PROMPT_TOKENS = 160
"""Longer than a cache block: 128 tokens in vLLM on a CPU, 16 to 64 in other engines."""
NUM_NEW_TOKENS = 4
SEED = 20


class WeightProbe(Probe):
    """Compares engines' logprobs with the trainer's (`infer_logprobs`), at `temperature`."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        temperature: float,
        gate: MismatchGate,
        infer_logprobs: Callable[[TokenBatch], Tensor],
    ) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._sampling = SamplingParams(NUM_NEW_TOKENS, temperature)
        self._gate, self._infer_logprobs = gate, infer_logprobs

    def request(self, place: int, version: int) -> RolloutRequest:
        """See `engines.rollout.publishing.Probe`."""
        return RolloutRequest(
            f"probe/version={version}/replica={place}", self._prompt_ids, self._sampling, (SEED,)
        )

    def check(self, requests: Sequence[RolloutRequest], found: Sequence[Completion]) -> None:
        """See `engines.rollout.publishing.Probe`."""
        rows = list(zip(requests, found, strict=True))
        batch = TokenBatch.from_sequences(
            [(*request.prompt_ids, *said.token_ids.tolist()) for request, said in rows],
            rollout_logprobs=[
                [0.0] * len(request.prompt_ids) + said.logprobs.tolist() for request, said in rows
            ],
        )
        differences_T = (self._infer_logprobs(batch) - batch.columns["rollout_logprobs"]).abs()
        for (request, _), difference_T in zip(
            rows, differences_T.split(batch.lengths_B.tolist()), strict=True
        ):
            # The median, because in bfloat16 single tokens may differ by nats.
            typical = float(difference_T[len(request.prompt_ids) :].median())
            if not typical <= self._gate.mean:
                raise WeightSyncError(
                    f"{request.request_id}: after the sync its logprobs are {typical:.3g} from the "
                    f"trainer's (median), above rl.mismatch.mean {self._gate.mean:.3g}: the bytes "
                    "arrived, and the engine computes with something else"
                )


def probe_prompt(hf_dir: Path, max_length: int) -> tuple[int, ...]:
    """Return random token ids, without single `*_token_id` of config.json, e.g. of images."""
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    special = [value for name, value in config.items() if name.endswith("_token_id")]
    ids = [
        i for i in range(int(config.get("text_config", config)["vocab_size"])) if i not in special
    ]
    size = max(1, min(NUM_PROMPT_TOKENS, max_length - NUM_NEW_TOKENS))
    places = torch.randint(len(ids), (size,), generator=torch.Generator().manual_seed(SEED))
    return tuple(ids[place] for place in places.tolist())
