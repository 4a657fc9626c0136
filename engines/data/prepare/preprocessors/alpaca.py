"""Alpaca rows: `instruction`, `output`, optionally `input`, `system` and `history`; supervised.

The question is the instruction followed by the input. `history` holds earlier turns as pairs of
question and answer; these answers are trained on as well. Sources: `data/README.md` of
LLaMA-Factory (`system`, `history`, the line break), tatsu-lab/stanford_alpaca (other columns).
"""

from collections.abc import Iterator

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns, optional_text
from engines.data.read.raw_rows import parse_json_list
from engines.data.read.rows import Message, RowError, SFTRow, check_text


class AlpacaOptions(StrictModel):
    """How instruction and input are joined, and the `data_source` of its rows."""

    separator: str = "\n"
    """Text between the instruction and the input, if there is an input."""
    data_source: str = "alpaca"


class Alpaca(Preprocessor[AlpacaOptions]):
    """Reads rows of instruction, optional input, and answer."""

    sft_columns = ("instruction", "output")

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Make a conversation of system message, earlier turns, question and answer."""
        system = optional_text(columns.get("system"), "system")
        given = [Message("system", system)] if system else []
        question = check_text(columns.get("instruction"), "instruction")
        if context := optional_text(columns.get("input"), "input"):
            question = f"{question}{self.options.separator}{context}"
        messages = (
            *given,
            *_history(columns.get("history")),
            Message("user", question),
            Message("assistant", check_text(columns.get("output"), "output")),
        )
        return SFTRow(messages, self.options.data_source)


def _history(value: object) -> Iterator[Message]:
    for place, pair in enumerate(parse_json_list(value, "history") if value else ()):
        where = f"history[{place}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"{where} is {pair!r:.40}; need a question and its answer")
        yield Message("user", check_text(pair[0], f"{where}[0]"))
        yield Message("assistant", check_text(pair[1], f"{where}[1]"))
