"""The commands against a small streaming server in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import bench.load
import bench.serve
from bench.api_stream import longest_gap_ms, steady_figures
from bench.measures import RequestRecord
from bench.peers import OURS, Paths, comparison_table, engines, lead_table
from bench.run_cases import CaseResult
from bench.scenarios import CPU_CASES
from tests.bench.sse_server import serving
from tests.bench.test_measures import record, summarize


@pytest.fixture
def url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    address: list[str] = []
    up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving() as (here, _):
            address.append(here)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    up.wait()
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def invoke(main: object, *arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(main)  # type: ignore[type-var]  # a command is any function
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_load_prints_a_table_and_writes_json(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    code, text = invoke(
        bench.load.main,
        "--url", url, "--model", "m", "--prompts", "tokens", "--requests", "6", "--concurrency", "2",
        "--output-tokens", "4", "--json", str(out),
    )  # fmt: skip
    assert code == 0, text
    assert "output tok/s" in text
    assert json.loads(out.read_text())["output_tokens"] == 24


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prompts", "tokens"], "either --concurrency"),
        (["--concurrency", "1"], "needs --tokenizer"),
        (["--concurrency", "1", "--tokenizer", "/no/such"], "no tokenizer.json"),
        (["--prompts", "tokens", "--concurrency", "1", "--url", "http://127.0.0.1:1"], "names no model"),
    ],
)
def test_load_explains_mistakes(arguments: list[str], why: str) -> None:
    code, text = invoke(bench.load.main, "--url", "http://127.0.0.1:1", *arguments)
    assert code == 2
    assert why in text
    assert "Traceback" not in text


def test_serve_measures_a_server_that_is_up(url: str, tmp_path: Path) -> None:
    code, text = invoke(
        bench.serve.main,
        "--url", url, "--model", "m", "--cases", "cpu1", "--prompts", "tokens", "--runs", "2",
        "--out", str(tmp_path), "--name", "echo",
    )  # fmt: skip
    assert code == 0, text
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    (case,) = document["cases"]
    assert case["case"] == "cpu1"
    assert [run["output_tokens"] for run in case["runs"]] == [384, 384]
    assert document["host"]["cores"] >= 1
    assert "| cpu1" in next(tmp_path.glob("*.md")).read_text()


def test_serve_needs_exactly_one_server() -> None:
    code, text = invoke(bench.serve.main, "--prompts", "tokens", "--cases", "cpu1")
    assert code == 2
    assert "either --url or" in text


def test_steady_figures_leave_out_the_ramp() -> None:
    a = record(0.0, 0.0, *[1.0 + i * 0.02 for i in range(51)], 9.0, n_output=53)
    figures = steady_figures([a], begin_s=1.0, end_s=2.0, step_ms=20.0)
    assert figures.events_per_s == 51
    assert figures.gap_p99_ms == pytest.approx(20.0)
    assert figures.added_p99_ms == pytest.approx(0.0, abs=1e-6)


def test_steady_figures_count_tokens_of_joined_events() -> None:
    a = record(0.0, *[1.0 + i * 0.04 for i in range(25)], n_output=50)
    assert steady_figures([a], begin_s=1.0, end_s=2.0, step_ms=20.0).tokens_per_s == 50


def test_longest_gap_lies_between_the_two_times() -> None:
    a = record(0.0, 1.0, 1.5, 1.9, 5.0, n_output=4)
    b = record(0.0, 1.2, 1.4, n_output=2)
    assert longest_gap_ms([a, b], begin_s=1.0, end_s=2.0) == pytest.approx(500.0)
    assert longest_gap_ms([a], begin_s=3.0, end_s=4.0) == 0.0


def test_steady_figures_of_nothing_name_the_error() -> None:
    bad = RequestRecord(start_s=0.0, n_input=1, n_expected=1, error="HTTP 503")
    with pytest.raises(ValueError, match="HTTP 503"):
        steady_figures([bad], begin_s=0.0, end_s=1.0, step_ms=20.0)


def test_engines_without_paths_are_left_out() -> None:
    gguf = Path("/m/model.Q4_1.gguf")
    assert [e.name for e in engines(Paths(gguf=gguf), n_threads=2)] == [OURS]
    every = Paths(
        gguf=gguf, gguf_f32=Path("/m/f32.gguf"), safetensors=Path("/m/st"),
        llama_server=Path("/l"), vllm=Path("/v"),
    )  # fmt: skip
    names = [e.name for e in engines(every, n_threads=2)]
    assert names == [OURS, "llama-server, Q4_1", "llama-server, float32", "vLLM CPU, float32"]


def test_llama_server_gets_a_slot_per_client() -> None:
    paths = Paths(gguf=Path("/m/model.Q4_1.gguf"), llama_server=Path("/l"))
    line = engines(paths, n_threads=2)[1].command(CPU_CASES[2]).line()
    assert "-np 32 -c 65536" in line


def test_comparison_and_lead() -> None:
    def result(gap_s: float) -> list[CaseResult]:
        return [CaseResult(case=CPU_CASES[0], runs=(summarize([record(0.0, gap_s, 2 * gap_s)]),))]

    results = {OURS: result(0.5), "q4": result(0.25), "f32": result(1.0)}
    assert "2.0 (0.50 s)" in comparison_table(results)
    lead = lead_table(results, {OURS, "f32"})
    assert "0.50 × q4" in lead
    assert "2.00 × f32" in lead
