"""Fills in the columns that the parts of an algorithm read: logprobs, values, what a teacher says.

Promises: what the rows of the parts name is computed, and nothing else; what is drawn depends on
the seed and the step alone, not on ranks or on what was drawn before.
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
    """See the module.

    Args:
        config: names the parts.
        run: calls a method of every rank's `ModelWorker`.
        seed: of the run.
        vocab_size: of the policy.
        teacher: who is asked of the teacher; None: the ranks, if the configuration has one.
    """

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
        """The same samples with every column that is read before they are cut into updates.

        Args:
            step: phases `old_log_prob`, `ref`, `teacher` and `values`.
            experience: of the step.

        Returns:
            With what the parts name; `old_logprobs` also where there is more than one update.
            Without samples as it was.
        """
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
        """What the critic says of every state, and of that behind each answer."""
        found = self._run(ModelWorker.infer, experience.batch, Readouts(last_values=True), CRITIC)
        batch = experience.batch.with_rows(**{LAST_VALUES: found.last_values_B})
        return replace(experience, batch=batch.with_columns(**{VALUES: found.values_T}))

    def _several_updates(self, experience: Experience) -> bool:
        """A single update is on-policy: its own pass yields the old logprobs."""
        config = self._config
        return experience.num_groups > config.prompts_per_update or config.num_epochs > 1

    def _uniform_T(self, num_tokens: int, global_step: int) -> Tensor:
        """(T,) float64: fine enough that no two tokens of a step have the same number."""
        seed = derive_seed(self._seed, f"step={global_step}/uniform")
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(num_tokens, generator=generator, dtype=torch.float64)
