"""UltraFeedback, binarized (arXiv:2310.01377): two answers of models with GPT-4's scores.

`chosen` and `rejected` are messages that repeat the question. Source: the card of
HuggingFaceH4/ultrafeedback_binarized, with splits such as `train_prefs` and `test_prefs`. The
rejected answer was drawn at random from the others, so the scores of a pair may be equal.
"""

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns
from engines.data.read.raw_rows import parse_number, preference_row
from engines.data.read.rows import PreferenceRow, RowError


class UltraFeedbackOptions(StrictModel):
    """Options: the `data_source` of its rows."""

    data_source: str = "HuggingFaceH4/ultrafeedback_binarized"


class UltraFeedback(Preprocessor[UltraFeedbackOptions]):
    """Reads pairs of answers with scores."""

    # `prompt_id` is not read; `auto` needs it to tell this data set from others with the rest.
    preference_columns = (
        "prompt",
        "prompt_id",
        "chosen",
        "rejected",
        "score_chosen",
        "score_rejected",
    )
    rl_columns = preference_columns

    def preference_row(self, columns: RawColumns) -> PreferenceRow:
        """Make a pair with the difference of the scores as margin."""
        names = ("score_chosen", "score_rejected")
        chosen, rejected = (parse_number(columns.get(name), name) for name in names)
        if chosen < rejected:
            raise RowError(f"score_chosen is {chosen}; need at least score_rejected {rejected}")
        answers = {name: columns.get(name) for name in ("prompt", "chosen", "rejected")}
        source = self.options.data_source
        return preference_row({**answers, "data_source": source, "margin": chosen - rejected})
