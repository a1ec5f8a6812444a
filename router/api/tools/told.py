"""Tools for models whose chat template knows nothing of them: told in plain words, within the messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

_WORDS = """You can call functions. These are available, each with the JSON schema of its arguments:

{functions}

To call one, answer with nothing but a JSON object such as
{{"name": "<function>", "arguments": {{"<argument>": "<value>"}}}}
Otherwise answer in plain words."""


def with_tools_told(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The functions stand in the system's words; calls are what the assistant said, results what the user
    then says."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _WORDS.format(functions=functions)
    told = [message if message["role"] == "tool" else _with_calls_written(message) for message in messages]
    if told[0]["role"] == "system":
        told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
    else:
        told.insert(0, {"role": "system", "content": words})
    return _with_results_said(told)


def _with_calls_written(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        for call in calls
    )
    content = message["content"]
    return {"role": message["role"], "content": f"{content}\n{written}" if content else written}


def _with_results_said(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that follow each other are one message: many templates want the roles to alternate."""
    said: list[dict[str, Any]] = []
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = "\n".join(f"Result of the call: {message['content']}" for message in group)
            said.append({"role": "user", "content": results})
        else:
            said += group
    return said
