"""xLAM function calling: columns `query`, `tools`, `answers`, `id`; one question and its calls.

`tools` and `answers` are JSON text: functions whose `parameters` are the properties of a JSON
schema, or one whole as OpenAI has them, and the calls `{name, arguments}` that answer. Sources: the
card of Salesforce/xlam-function-calling-60k (columns), that of Salesforce/xLAM-7b-fc-r, whose
`convert_to_xlam_tool` keeps of OpenAI's `parameters` the `properties`.
"""

from collections.abc import Mapping
from typing import Any

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor
from engines.data.read.raw_columns import (
    json_text,
    parse_json,
    parse_json_list,
    parse_json_object,
    parse_tool_calls,
    parse_tools,
)
from engines.data.read.rows import (
    Message,
    RewardModel,
    RLRow,
    SFTRow,
    ToolCall,
    check_json,
    check_text,
    said_beside,
    with_tools,
)


class XLAMOptions(StrictModel):
    """What the rows are called."""

    data_source: str = "Salesforce/xlam-function-calling-60k"


class XLAM(Preprocessor[XLAMOptions]):
    """A question, the functions at hand, and the calls that answer it."""

    rl_columns = ("query", "tools", "answers")
    sft_columns = ("query", "tools", "answers")

    def rl_row(self, columns: Mapping[str, Any]) -> RLRow:
        """The ground truth is a list of `{name, arguments}`."""
        calls = [
            {"name": call.name, "arguments": parse_json(call.arguments, "answers", "")}
            for call in _calls(columns)
        ]
        return RLRow(
            self.options.data_source, _prompt(columns), "tool_use", RewardModel("rule", calls)
        )

    def sft_row(self, columns: Mapping[str, Any]) -> SFTRow:
        """The calls are the assistant's, without a text."""
        answer = said_beside(None, _calls(columns))
        return SFTRow((*_prompt(columns), answer), self.options.data_source)


def _calls(columns: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return parse_tool_calls(parse_json_list(columns.get("answers"), "answers"), "answers")


def _prompt(columns: Mapping[str, Any]) -> tuple[Message, ...]:
    question = Message("user", check_text(columns.get("query"), "query"))
    tools = []
    for place, item in enumerate(parse_json_list(columns.get("tools"), "tools")):
        function = parse_json_object(item, f"tools[{place}]")
        schema = parse_json_object(function.get("parameters"), f"tools[{place}].parameters")
        if schema.get("type") != "object":  # a property of that name is described by an object
            schema = {"type": "object", "properties": schema}
        function["parameters"] = schema
        check_json(function, f"tools[{place}]")
        tools.append(json_text(function))
    return with_tools((question,), parse_tools(tools, "tools"))
