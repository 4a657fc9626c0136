"""Fill in the columns that the algorithm reads: logprobs, values, the teacher's outputs.

Promises: nothing else is computed; random draws depend only on the seed and the step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.config.rows.algorithm import ADVANTAGES, POLICY_LOSSES
from engines.config.sections import RLConfig
from engines.controller.model_worker import ModelWorker
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.samples.prompts import derive_seed
from engines.trainers.step.experience import Experience
from engines.trainers.step.teacher import RankTeacher, Teacher
from engines.training.roles import CRITIC, REFERENCE
from engines.types import Readouts

OLD, SQUARES, REFERENCE_LOGPROBS = "old_logprobs", "sum_pi_squared", "ref_logprobs"
UNIFORM, POSITIVE = "uniform", "positive"
VALUES, LAST_VALUES = "values", "last_values"


class Preparer:
    """Computes the columns; a `teacher` of None uses the ranks' role `teacher`, if configured."""

    def __init__(
        self,
        config: RLConfig,
        run: Callable[..., Any],
        seed: int,
        vocab_size: int,
        teacher: Teacher | None = None,
    ) -> None:
        algorithm = config.algorithm
        self._config, self._run, self._seed = config, run, seed
        if teacher is None and config.distillation is not None:
            teacher = RankTeacher(config.distillation, run, vocab_size)
        self._teacher = teacher
        self._needed = {
            *ADVANTAGES.find(algorithm.adv_estimator).columns,
            *POLICY_LOSSES.find(algorithm.loss_mode).columns,
            *({REFERENCE_LOGPROBS} if algorithm.needs_reference else ()),
            *({OLD} if algorithm.use_kl_in_reward else ()),
            *({POSITIVE} if algorithm.positive_nll_coef else ()),
        }

    def fill(self, step: LoopStep, experience: Experience) -> Experience:
        """Add every column that is read before the split into updates, if there are samples."""
        if not experience.num_groups:
            return experience
        clock, columns = step.clock, dict[str, Tensor]()
        with clock("old_log_prob"):
            if OLD in self._needed or self._several_updates(experience):
                readouts = Readouts(sum_pi_squared=SQUARES in self._needed)
                found = self._run(ModelWorker.infer, experience.batch, readouts)
                columns[OLD] = found.logprobs_T
                if found.sum_pi_squared_T is not None:
                    columns[SQUARES] = found.sum_pi_squared_T
        with clock("ref"):
            if REFERENCE_LOGPROBS in self._needed:
                infer = ModelWorker.infer_logprobs
                columns[REFERENCE_LOGPROBS] = self._run(infer, experience.batch, REFERENCE)
        with clock("teacher"):
            if self._teacher is not None:
                columns |= self._teacher.columns(experience.batch)
        with clock("values"):
            if VALUES in self._needed:
                experience = self._with_values(experience)
        if UNIFORM in self._needed:
            columns[UNIFORM] = self._uniform_T(experience.batch.num_tokens, step.global_number)
        if POSITIVE in self._needed:
            columns[POSITIVE] = experience.positive_T
        return experience.with_columns(**columns)

    def _with_values(self, experience: Experience) -> Experience:
        """Add the critic's value of every state, and of the state after each answer."""
        found = self._run(ModelWorker.infer, experience.batch, Readouts(last_values=True), CRITIC)
        batch = experience.batch.with_rows(**{LAST_VALUES: found.last_values_B})
        return replace(experience, batch=batch.with_columns(**{VALUES: found.values_T}))

    def _several_updates(self, experience: Experience) -> bool:
        """Return True if an update is off-policy; a single one computes the old logprobs itself."""
        config = self._config
        return experience.num_groups > config.prompts_per_update or config.num_epochs > 1

    def _uniform_T(self, num_tokens: int, global_step: int) -> Tensor:
        """Return (T,) float64, fine enough that no two tokens of a step have the same number."""
        seed = derive_seed(self._seed, f"step={global_step}/uniform")
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(num_tokens, generator=generator, dtype=torch.float64)
