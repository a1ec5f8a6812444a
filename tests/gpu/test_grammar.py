"""Answers that follow a grammar on the GPU runner (Triton's interpreter), two steps in flight."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("xgrammar") is None:
    pytest.skip("needs triton, whose interpreter runs the kernels, and xgrammar", allow_module_level=True)

import torch

from bench.run_ahead import Request, RunAhead
from proto.codec import pack_f32, pack_i32
from proto.worker_pb2 import Grammar, RowError, Sampling
from tests.gpu import simulated
from tests.worker.grammar.tiny import END, N_PADDED, json_schema, make_compiler, text
from tests.worker.model.tiny import make_model, open_checkpoint
from worker.gpu.runner import GpuRunner
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.rows import GrammarRows
from worker.models.config import spec_from_config
from worker.models.spec import DecoderWeights
from worker.weights import load_weights

YES_NO = Grammar(kind=Grammar.CHOICE, source='["yes", "no"]')
NUMBER = Grammar(kind=Grammar.REGEX, source="[0-9]{3}-[0-9]{3}")
SCHEMA = json_schema('{"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}')


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.install(monkeypatch)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = make_compiler()
    for grammar in (YES_NO, NUMBER, SCHEMA):
        compiler.submit(grammar).result()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> DecoderWeights:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(
        "llama", folder, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=N_PADDED,
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    return load_weights(
        checkpoint, spec_from_config(checkpoint.config), device=torch.device("cpu"), dtype=torch.float32
    )


def make_runner(weights: DecoderWeights, compiler: GrammarCompiler, *, graphs: bool = False) -> GpuRunner:
    return simulated.make_runner(
        weights, block_size=16, graphs=graphs, grammars=GrammarRows(compiler, n_threads=2)
    )


def requests() -> list[Request]:
    hot = Sampling(temperature=1.5, seed=5)
    return [
        Request([9, 8, 7], 5, Sampling(), grammar=YES_NO),
        Request([5, 6], 9, Sampling()),
        Request([3, 9, 4, 2], 9, hot, grammar=NUMBER),
        Request([7, 7], 9, hot, grammar=SCHEMA),
        Request([4, 4, 5], 9, hot),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "graphs"), [(1, False), (2, True)])
def test_answers_follow_their_grammars(
    weights: DecoderWeights, compiler: GrammarCompiler, window: int, graphs: bool
) -> None:
    runner = make_runner(weights, compiler, graphs=graphs)
    choice, free, number, schema, seeded = RunAhead(runner, window=window).run(requests())
    assert text(choice[: choice.index(END)]) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", text(number[: number.index(END)]))
    assert text(schema[: schema.index(END)]).replace(" ", "").startswith('{"b":')
    plain = requests()
    for request in plain:
        request.grammar = None
    alone = RunAhead(make_runner(weights, compiler), window=1).run(plain)
    assert [free, seeded] == [alone[1], alone[4]]


@pytest.mark.slow
def test_a_replayed_row_goes_on_where_it_was(weights: DecoderWeights, compiler: GrammarCompiler) -> None:
    """As after a preemption: prompt and output are computed again, the matcher is replayed."""
    whole = RunAhead(make_runner(weights, compiler)).run(requests())[3]
    again = requests()[3]
    again.output = list(whole[:4])
    runner = make_runner(weights, compiler)
    assert RunAhead(runner).run([again])[0] == whole


@pytest.mark.slow
def test_a_dead_end_fails_its_row_alone(weights: DecoderWeights, compiler: GrammarCompiler) -> None:
    rows = requests()
    digits = [2 + ord(char) for char in "0123456789"]
    rows[2].sampling = Sampling(bias_ids=pack_i32(digits), bias_values=pack_f32([-np.inf] * 10))
    driver = RunAhead(make_runner(weights, compiler))
    driver.run(rows)
    errors = [error for result in driver.results for error in result.errors]
    assert {error.row for error in errors} == {2}
    assert errors[0].kind == RowError.GRAMMAR
    assert "logit_bias" in errors[0].message


@pytest.mark.slow
def test_a_row_that_another_request_took_hears_nothing_of_the_old_one(
    weights: DecoderWeights, compiler: GrammarCompiler
) -> None:
    """The last token of a row arrives after the row was given away."""
    first = Request([5, 6], 3, Sampling(), grammar=SCHEMA)
    second = Request([3, 4], 3, Sampling(), grammar=YES_NO)
    driver = RunAhead(make_runner(weights, compiler))
    driver.run([first, second], n_rows=1)
    assert text(second.output)[:2] in ("ye", "no")
    assert not any(result.errors for result in driver.results)
