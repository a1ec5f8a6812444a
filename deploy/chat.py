"""A small terminal client: streams answers, keeps the talk, and has no state beyond it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    model: str = ""
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    api_key: str = ""


class ChatError(Exception):
    """The server refused or can't be reached; the message is for the user."""


@dataclass(slots=True)
class Talk:
    """The messages so far, as the API takes them."""

    client: httpx.Client
    options: ChatOptions
    model: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def connect(self) -> None:
        """Finds the model. Raises ChatError."""
        with _user_errors(self.client):
            response = self.client.get("/v1/models")
            _raise_refusal(response)
            served = [entry["id"] for entry in response.json()["data"]]
        self.model = self.options.model or (served[0] if served else "")
        self.reset()

    def reset(self) -> None:
        system = _sendable(self.options.system)
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Streams the answer into `show` and keeps it; what came before Ctrl-C (KeyboardInterrupt, which
        closes the stream and so stops the server's work) is kept too. Raises ChatError, keeping nothing."""
        messages = [*self.messages, {"role": "user", "content": _sendable(text)}]
        parts: list[str] = []
        try:
            for part in self._stream(messages):
                parts.append(part)
                show(part)
        except KeyboardInterrupt:
            if not parts:
                raise
            self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
            raise
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body: dict[str, Any] = {"model": _sendable(self.model), "messages": messages, "stream": True}
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        with (
            _user_errors(self.client),
            self.client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                _raise_refusal(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(event["error"].get("message", data))
                for choice in event.get("choices", ()):
                    if content := choice.get("delta", {}).get("content"):
                        yield content
            raise ChatError("the stream ended before the answer did")


def run_chat(url: str, options: ChatOptions) -> int:
    """The loop at the terminal; its exit code."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() history and editing)
    if isinstance(sys.stdin, io.TextIOWrapper) and isinstance(sys.stdout, io.TextIOWrapper):
        # Whatever the locale: what is typed arrives, and a character that the terminal lacks is shown as "?".
        sys.stdin.reconfigure(errors="surrogateescape")
        sys.stdout.reconfigure(errors="replace")
    try:
        client = _client(url, api_key=options.api_key)
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with client:
        talk = Talk(client, options)
        try:
            talk.connect()
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{talk.model} at {url}. /reset forgets the talk, /quit ends, Ctrl-C stops an answer.")
        return _loop(talk)


def _client(url: str, *, api_key: str) -> httpx.Client:
    """For the server's address or the one that OpenAI's clients take, which ends in /v1. Raises ChatError."""
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise ChatError(f"{url}: {error}") from error
    except UnicodeEncodeError as error:
        raise ChatError("the API key (--api-key, QUIRE_API_KEY) holds more than ASCII characters") from error


def _sendable(text: str) -> str:
    """Bytes of the terminal that were no characters of its encoding are lone surrogates in Python, which
    JSON can't carry: read as UTF-8 as far as they are."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _loop(talk: Talk) -> int:
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text in ("/quit", "/exit"):
            return 0
        if text == "/reset":
            talk.reset()
            print("(forgotten)")
        elif text.startswith("/"):
            print("(commands: /reset, /quit)")
        elif text:
            _answer(talk, text)


def _answer(talk: Talk, text: str) -> None:
    try:
        talk.ask(text, _show)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)")
    except ChatError as error:
        print(f"\nerror: {error}", file=sys.stderr)


def _show(part: str) -> None:
    sys.stdout.write(part)
    sys.stdout.flush()


@contextlib.contextmanager
def _user_errors(client: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise ChatError(f"no server answers at {client.base_url}: start one with `make run`") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatError(f"{client.base_url}: {error or type(error).__name__}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ChatError(f"{client.base_url} does not answer as an OpenAI-style server") from error


def _raise_refusal(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    raise ChatError(f"{message} (HTTP {response.status_code})")
