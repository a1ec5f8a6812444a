"""Deltas join to exactly what the library decodes, whatever the bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from checkpoint.tokenizer import Tokenizer, TokenizerSettings
from router.api.detokenize import TokenTable, build_token_table
from tests.api.tiny import byte_ids, ids, tiny_tokenizer

TEXTS = (
    "hello world",
    "안녕하세요, 세계!",
    "👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "e\u0301 naïve — “quotes”",
    "日本語と中文",
    "مرحبا 𝕬𝖇𝖈",
)


def _ids(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _join(table: TokenTable, prompt: np.ndarray, output: list[int]) -> str:
    detokenizer = table.detokenizer(prompt)
    return "".join(detokenizer.push(token) for token in output)


def _without_unfinished(text: bytes) -> str:
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("encode", [ids, byte_ids])
def test_pieces_join_to_the_text(text: str, encode: object) -> None:
    table = build_token_table(tiny_tokenizer())
    assert table.kind == "byte_level"
    assert _join(table, _ids(5), encode(text)) == text  # type: ignore[operator]  # one of two functions


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_a_broken_character(text: str) -> None:
    detokenizer = build_token_table(tiny_tokenizer()).detokenizer(_ids(5))
    for token in byte_ids(text):
        assert "\ufffd" not in detokenizer.push(token)


def test_random_tokens_equal_decode() -> None:
    """Random bytes are mostly ill-formed: every replacement character must stand where the library has it."""
    tokenizer = tiny_tokenizer()
    table = build_token_table(tokenizer)
    draw = random.Random(7)
    for _ in range(2000):
        pool = draw.choice([range(2, 258), range(130, 258), [2 + b for b in "é한👍".encode()], range(266)])
        output = [draw.choice(pool) for _ in range(draw.randint(1, 24))]
        closed = [*output, *byte_ids("a")]  # an ASCII letter ends whatever was unfinished
        assert _join(table, _ids(5), closed) == tokenizer.decode(closed)


def test_unfinished_character_at_the_end_is_left_out() -> None:
    table = build_token_table(tiny_tokenizer())
    assert _join(table, _ids(5), byte_ids("ok 👍")[:-1]) == "ok "


def test_prompt_that_ends_inside_an_emoji() -> None:
    """The answer completes the character: prompt text and answer text join to the whole."""
    tokenizer = tiny_tokenizer()
    table = build_token_table(tokenizer)
    whole = byte_ids("see 👨‍👩‍👧 there")
    for cut in range(1, len(whole)):
        prompt = np.asarray(whole[:cut], dtype=np.int32)
        joined = table.whole_text(prompt) + _join(table, prompt, whole[cut:])
        assert joined == "see 👨‍👩‍👧 there"


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = tiny_tokenizer()
    output = [*byte_ids("é")[:1], 0, *byte_ids("é")[1:], 1]
    hidden = build_token_table(tokenizer)
    assert _join(hidden, _ids(5), output) == tokenizer.decode(output) == "é"
    shown = build_token_table(tokenizer, skip_special=False)
    assert _join(shown, _ids(5), output) == tokenizer.decode(output, skip_special=False)


def test_ids_beyond_the_vocabulary_show_nothing() -> None:
    table = build_token_table(tiny_tokenizer())
    assert _join(table, _ids(5), [9999, *byte_ids("é")[:1], 9999, *byte_ids("é")[1:]]) == "é"


def _fallback_tokenizer(*, strip: bool) -> Tokenizer:
    vocab = {"<unk>": 0, "</s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁hello", "▁world", "lo", "한", "!"):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, TokenizerSettings())


@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback_equals_decode(strip: bool) -> None:
    """Against the library, for runs of bytes that are well-formed or wholly ill-formed."""
    tokenizer = _fallback_tokenizer(strip=strip)
    table = build_token_table(tokenizer)
    assert table.kind == "byte_fallback"
    pieces = [[258], [259], [260], [261], [262], [263], [1], [2 + 0x80], [2 + 0xFF]]
    pieces += [[2 + byte for byte in text.encode()] for text in ("é", "👍", "한", "\n")]
    draw = random.Random(3)
    prompt = [259]
    for _ in range(2000):
        output: list[int] = []
        for _ in range(draw.randint(1, 8)):
            piece = draw.choice(pieces)
            output += [*piece, 262]  # a text token ends each run of bytes
        whole = tokenizer.decode(prompt + output)
        assert tokenizer.decode(prompt) + _join(table, _ids(*prompt), output) == whole


def test_byte_fallback_across_the_prompts_end() -> None:
    tokenizer = _fallback_tokenizer(strip=True)
    table = build_token_table(tokenizer)
    emoji = [2 + byte for byte in "👍".encode()]
    prompt = _ids(259, *emoji[:2])
    assert table.whole_text(prompt) == "hello"
    assert _join(table, prompt, [*emoji[2:], 260]) == "👍 world"


def test_other_decoders_go_through_a_window() -> None:
    vocab = {"[UNK]": 0, "[CLS]": 1, "hello": 2, "##ing": 3, "world": 4, "go": 5, "!": 6}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens([AddedToken("[CLS]", special=True)])
    tokenizer = Tokenizer(backend, TokenizerSettings())
    table = build_token_table(tokenizer)
    assert table.kind == "generic"
    draw = random.Random(5)
    for _ in range(200):
        prompt = [draw.randint(2, 6) for _ in range(draw.randint(1, 12))]
        output = [draw.randint(1, 6) for _ in range(60)]
        joined = tokenizer.decode(prompt) + _join(table, _ids(*prompt), output)
        assert joined == tokenizer.decode(prompt + output)
