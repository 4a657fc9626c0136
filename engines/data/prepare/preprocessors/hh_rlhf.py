"""Anthropic's HH-RLHF (arXiv:2204.05862): `chosen` and `rejected`, each a whole dialogue as text.

Turns begin with `Human:` or `Assistant:` after an empty line. The dialogues of a pair differ only
in the last answer; a pair that differs earlier is refused, since its prompts differ.
"""

import re
from dataclasses import asdict

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns
from engines.data.read.raw_rows import preference_row
from engines.data.read.rows import Message, PreferenceRow, RowError, check_text

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class HHRLHFOptions(StrictModel):
    """Options: the `data_source` of its rows."""

    data_source: str = "Anthropic/hh-rlhf"


class HHRLHF(Preprocessor[HHRLHFOptions]):
    """Reads pairs of dialogues."""

    preference_columns = ("chosen", "rejected")
    rl_columns = preference_columns

    def preference_row(self, columns: RawColumns) -> PreferenceRow:
        """Make a pair of the last answers of the dialogues."""
        chosen, rejected = (
            [asdict(message) for message in turns(columns.get(name), name)]
            for name in ("chosen", "rejected")
        )
        return preference_row(
            {
                "chosen": chosen,
                "rejected": rejected,
                "data_source": self.options.data_source,
            }
        )


def turns(dialogue: object, name: str) -> tuple[Message, ...]:
    """Return the stripped messages of a dialogue.

    Raises:
        RowError: it does not begin with a turn, or a turn is empty.
    """
    before, *parts = _TURN.split("\n\n" + check_text(dialogue, name).strip())
    if before.strip() or not parts:
        raise RowError(f"{name} does not begin with 'Human:'")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return tuple(
        Message(_ROLES[who], check_text(said.strip(), f"{name}[{place}]"))
        for place, (who, said) in enumerate(pairs)
    )
