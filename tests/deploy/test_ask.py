from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from deploy.ask import ask, main


class _Router(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["Authorization"] == "Bearer secret":
            self._answer(200, '{"got": ' + body + "}")
        else:
            self._answer(401, '{"error": {"message": "The API key is wrong"}}')

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def port() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Router) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield str(server.server_port)
        server.shutdown()
        thread.join()


def test_the_routers_own_key_is_used(port: str) -> None:
    env = {"QUIRE_PORT": port, "QUIRE_API_KEYS": "secret, other"}
    assert ask("POST", "/x", '{"a": 1}', env=env) == (0, '{"got": {"a": 1}}')
    assert ask("POST", "/x", "", env=env) == (0, '{"got": {}}')


def test_why_there_is_no_answer(port: str) -> None:
    assert ask("POST", "/x", "{}", env={"QUIRE_PORT": port}) == (1, "The API key is wrong")
    code, text = ask("GET", "/x", "", env={"QUIRE_PORT": port})
    assert (code, text) == (1, "/x answered 501")
    code, text = ask("GET", "/x", "", env={"QUIRE_PORT": "1"})
    assert code == 1
    assert "refused" in text


def test_a_wrong_call_shows_how() -> None:
    assert main(["GET"]) == 2
