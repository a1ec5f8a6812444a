"""From a worker's settings and its model to the rows' grammars."""

from __future__ import annotations

import importlib.util

import structlog

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.tokenizer import load_tokenizer
from worker.config import WorkerConfig
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.rows import GrammarRows
from worker.grammar.vocabulary import grammar_vocabulary

NO_GRAMMARS = "this worker does not constrain answers by a grammar"


def make_grammar_rows(config: WorkerConfig, checkpoint: Checkpoint) -> GrammarRows | None:
    """None, with a word in the log, where answers can't be constrained."""
    log = structlog.get_logger("worker.grammar")
    if importlib.util.find_spec("xgrammar") is None:
        log.warning("answers can't be constrained by a grammar", cause="xgrammar is not installed")
        return None
    if not checkpoint.eos_token_ids:
        log.warning("answers can't be constrained by a grammar", cause="the model has no end token")
        return None
    try:
        tokenizer = load_tokenizer(checkpoint)
    except CheckpointError as error:
        log.warning("answers can't be constrained by a grammar", cause=str(error))
        return None
    compiler = GrammarCompiler(
        vocabulary=grammar_vocabulary(tokenizer, vocab_size=checkpoint.vocab_size),
        stop_token_ids=checkpoint.eos_token_ids,
        timeout_s=config.grammar_timeout_s,
        cache_bytes=config.grammar_cache_mb * 1024 * 1024,
    )
    return GrammarRows(compiler)
