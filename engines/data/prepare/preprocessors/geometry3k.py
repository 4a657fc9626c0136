"""Geometry3k (arXiv:2105.04165) with its images: columns `images`, `problem` and `answer`.

`problem` has an `<image>` for each of `images`, whose bytes are in the table. The prompt asks for
a boxed answer, which the `math` reward reads. Source: the card of hiyouga/geometry3k.
"""

from engines.data.prepare.preprocessors.base import (
    Preprocessor,
    ProblemOptions,
    RawColumns,
    instructed,
    text_answer,
)
from engines.data.read.raw_rows import parse_images
from engines.data.read.rows import RewardModel, RLRow, RowError, with_images


class Geometry3kOptions(ProblemOptions):
    """Options: the prompt, and the `data_source` of its rows."""

    data_source: str = "hiyouga/geometry3k"


class Geometry3k(Preprocessor[Geometry3kOptions]):
    """Reads a problem, its figures and its answer."""

    rl_columns = ("images", "problem", "answer")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the column `answer` as ground truth."""
        images = parse_images(columns.get("images"), "images")
        if not images:
            raise RowError("images is empty; need an image")
        problem = instructed(columns.get("problem"), "problem", self.options.instruction)
        return RLRow(
            self.options.data_source,
            with_images([problem], images),
            "math",
            RewardModel("rule", text_answer(columns.get("answer"), "answer")),
        )
