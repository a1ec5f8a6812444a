from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.arrivals import poisson_arrivals_s
from bench.prompts import PromptShape, WordVocabulary, load_tokenizer, random_texts, random_token_lists
from bench.report import runs_table, write_report
from bench.scenarios import GPU_CASES, choose_cases


def word_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with 300 whole words (and pieces that are none)."""
    words = ["Ġ" + "".join(w) for w in itertools.islice(itertools.product("abcdefg", repeat=4), 300)]
    vocab = {w: i for i, w in enumerate([*words, "abcd", "Ġ1234", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_text_prompts_have_exactly_the_tokens_asked_for() -> None:
    tokenizer = word_tokenizer()
    words = WordVocabulary(tokenizer)
    assert len(words) == 300
    texts = random_texts(words, PromptShape(n_own=7, n_prefix=20), n=5, seed=1)
    ids = [tokenizer.encode(text).ids for text in texts]
    assert {len(i) for i in ids} == {27}
    assert len({tuple(i[:20]) for i in ids}) == 1
    assert len({tuple(i) for i in ids}) == 5


def test_prompts_follow_the_seed() -> None:
    shape = PromptShape(n_own=4)
    assert random_token_lists(1000, shape, n=3, seed=5) == random_token_lists(1000, shape, n=3, seed=5)
    assert random_token_lists(1000, shape, n=3, seed=5) != random_token_lists(1000, shape, n=3, seed=6)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="--prompts tokens"):
        WordVocabulary(Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_arrivals_rise_and_offer_exactly_the_rate() -> None:
    times = poisson_arrivals_s(n=320, rate_per_s=16.0, seed=7)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0)
    assert times == poisson_arrivals_s(n=320, rate_per_s=16.0, seed=7)
    with pytest.raises(ValueError, match="--rate 0"):
        poisson_arrivals_s(n=1, rate_per_s=0.0, seed=7)


def test_cases_are_chosen_by_name_or_group() -> None:
    assert [c.name for c in choose_cases("gpu")] == ["c1", "c256", "shared", "long", "rate16"]
    assert [c.name for c in choose_cases("long,cpu1")] == ["long", "cpu1"]
    with pytest.raises(ValueError, match="c256"):
        choose_cases("c3")


def test_every_run_of_every_case_has_its_own_seed() -> None:
    seeds = {case.seed(base=7, run=run) for case in GPU_CASES for run in range(3)}
    assert len(seeds) == 15


def test_a_dry_run_keeps_the_clients_busy() -> None:
    assert choose_cases("c256")[0].scaled(0.01).n_requests == 256
    assert choose_cases("rate16")[0].scaled(0.1).n_requests == 32


def test_reports_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, _ = write_report(tmp_path, "x", {"a": 1}, "# one")
    second, third = write_report(tmp_path, "x", {"a": 2}, "# two")
    assert first != second
    assert json.loads(first.read_text()) == {"a": 1}
    assert third.read_text() == "# two\n"


def test_missing_figures_are_dashes() -> None:
    none = {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    summary = {
        "output_tok_s": 1234.5, "total_tok_s": 2.0, "n_errors": 0,
        "ttft_ms": none, "tpot_ms": none, "itl_ms": none,
    }  # fmt: skip
    row = runs_table([("c1", summary)]).splitlines()[-1]
    assert "1,234" in row
    assert "–" in row
