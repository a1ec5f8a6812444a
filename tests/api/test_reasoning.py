"""`<think>` parts: kept apart, in any pieces, and out of reach of stop strings."""

from __future__ import annotations

import pytest

from router.api.reasoning import ReasoningCounter, ReasoningSplitter, ReasoningStop
from router.api.stop import StopMatcher
from tests.api.conftest import MakeApi
from tests.api.scripted import Script
from tests.api.sse import events
from tests.api.tiny import TEMPLATE, byte_ids

THINKING = TEMPLATE + "{# <think></think> #}"
OPENING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# </think> #}"

CASES = [
    (False, "<think>\nhm STOP </b>\n</think>\n\nYes", "hm STOP </b>", "Yes"),
    (False, " <think>a</think>b", "a", "b"),
    (False, "plain </think> words", "", "plain </think> words"),
    (False, "<thin air", "", "<thin air"),
    (False, "<think>cut off </thi", "cut off </thi", ""),
    (False, "<think></think>\n\nYes", "", "Yes"),
    (True, "so </think> Yes", "so", "Yes"),
    (True, "only thoughts", "only thoughts", ""),
    (False, "", "", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_any_pieces(inside: bool, text: str, reasoning: str, content: str) -> None:
    for size in range(1, len(text) + 2):
        splitter = ReasoningSplitter(inside=inside)
        parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
        parts.append(splitter.push("", final=True))
        assert "".join(part[0] for part in parts) == reasoning, size
        assert "".join(part[1] for part in parts) == content, size


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>a STOP b</think>c STOP d", "<think>a STOP b</think>c "),
        (True, "a STOP b</think>c STOP d", "a STOP b</think>c "),
        (False, "c STOP d", "c "),
        (False, "<think>STOP", "<think>STOP"),
        (False, "<thi STOP", "<thi "),
        (False, "<th", "<th"),
    ],
)
def test_stop_strings_apply_to_the_answer(inside: bool, text: str, expected: str) -> None:
    """vLLM #14399."""
    for size in range(1, len(text) + 1):
        stop = ReasoningStop(StopMatcher(["STOP"]), inside=inside)
        shown = ""
        for i in range(0, len(text), size):
            shown += stop.push(text[i : i + size])
            if stop.matched:
                break
        else:
            shown += stop.flush()
        assert shown == expected, size


@pytest.mark.parametrize("template", [THINKING, OPENING])
async def test_over_http(make_api: MakeApi, template: str) -> None:
    text = ("<think>\n" if template is THINKING else "") + "why STOP\n</think>\n\nYes. STOP no"
    api = make_api(Script(byte_ids(text)), template=template)
    choice = (await api.chat(stop="STOP", max_tokens=99)).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "why STOP"
    assert choice["message"]["content"] == "Yes. "
    assert choice["finish_reason"] == "stop"
    chunks = events((await api.chat(stop="STOP", max_tokens=99, stream=True, logprobs=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why STOP"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes. "
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    told = sum(len(part["content"]) for part in logprobs if part)
    assert told == len(byte_ids(text.partition(" no")[0])) - len(" STOP") + 1


@pytest.mark.parametrize(("flag", "template"), [("none", THINKING), ("auto", TEMPLATE)])
async def test_left_in_the_text(make_api: MakeApi, flag: str, template: str) -> None:
    api = make_api(Script(byte_ids("<think>a</think>b")), template=template, reasoning_parser=flag)
    message = (await api.chat()).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message


async def test_the_flag_turns_it_on(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids("<think>a</think>b")), reasoning_parser="think")
    assert (await api.chat()).json()["choices"][0]["message"]["content"] == "b"


@pytest.mark.parametrize(
    ("text", "inside", "n"),
    [
        ("<think>hm</think>Yes", False, 17),
        (" \n<think>hm</think>Yes <think>x</think>", False, 19),
        ("hm</think>Yes", True, 10),
        ("hm </thi", True, 8),
        ("<thinner>", False, 0),
        ("<think></think>", False, 15),
        ("<thin", False, 0),
        ("Yes", False, 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_thoughts(text: str, inside: bool, n: int, size: int) -> None:
    """Counted in characters; with longer tokens, those that hold a part of the thoughts."""
    counter = ReasoningCounter(inside=inside)
    for start in range(0, len(text), size):
        counter.push(text[start : start + size])
    assert counter.n_tokens == -(-n // size)
    hidden = ReasoningCounter(inside=True)
    hidden.push("")
    assert hidden.n_tokens == 1


async def test_usage_tells_the_tokens_of_thoughts(make_api: MakeApi) -> None:
    api = make_api(Script(byte_ids("<think>hm</think>Yes")), template=THINKING)
    usage = (await api.chat()).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 17}
    assert (await make_api(Script(byte_ids("Yes"))).chat()).json()["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0
    }
