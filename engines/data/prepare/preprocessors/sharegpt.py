"""ShareGPT rows: `conversations`, a list of turns with `from` and `value`; supervised.

`from` is `human`, `gpt`, `system` or `tool` (what a tool returned; `observation` is the same), and
`user`, `assistant`, `role` and `content` are read as well, for both ways of writing occur under
this column. A column `system` holds the system message where no turn does. The call of a tool has
to stand in the text of a `gpt` turn; descriptions of tools, in the system message.
Every answer is trained on. Sources: `data/README.md` of LLaMA-Factory (columns, roles, `system`),
the data sets Open-Orca/SlimOrca (`weight`) and NousResearch/hermes-function-calling-v1 (`tool`).
"""

from collections.abc import Mapping
from typing import Any

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, optional_text
from engines.data.read.raw_columns import check_weight, parse_json_list
from engines.data.read.rows import Message, RowError, SFTRow, check_roles, check_text

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class ShareGPTOptions(StrictModel):
    """What the rows are called."""

    data_source: str = "sharegpt"


class ShareGPT(Preprocessor[ShareGPTOptions]):
    """Conversations of several turns."""

    sft_columns = ("conversations",)

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The turns as messages; a system message that is empty is none."""
        turns = parse_json_list(columns.get("conversations"), "conversations")
        parsed = [_message(turn, f"conversations[{place}]") for place, turn in enumerate(turns)]
        messages = tuple(message for message in parsed if message is not None)
        check_roles(messages, "conversations", last="assistant")
        system = optional_text(columns.get("system"), "system")
        if system:
            if messages[0].role == "system":
                raise RowError("system is given beside a turn from system; need one of the two")
            messages = (Message("system", system), *messages)
        return SFTRow(messages, self.options.data_source)


def _message(turn: object, where: str) -> Message | None:
    """A turn as a message; None for a system message without text."""
    if not isinstance(turn, Mapping):
        raise RowError(f"{where} is {turn!r:.40}; need an object with from and value")
    # A table gives every turn the keys of all, null where it has none.
    other = turn.get("from") is None and turn.get("role") is not None
    by, said = ("role", "content") if other else ("from", "value")
    who = turn.get(by)
    role = _ROLES.get(who) if isinstance(who, str) else None
    if role is None:
        raise RowError(f"{where}.{by} is {who!r}; need human, gpt, system or tool")
    if role == "system" and optional_text(turn.get(said), f"{where}.{said}") is None:
        return None
    check_weight(turn, role, where)
    return Message(role, check_text(turn.get(said), f"{where}.{said}"))
