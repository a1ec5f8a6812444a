"""Tokenizers from folders and from GGUF metadata, against references that share no code with ours."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, processors

from checkpoint.checkpoint import Checkpoint, CheckpointError
from checkpoint.gguf_tokenizer import TokenType, tokenizer_from_metadata
from checkpoint.tokenizer import load_tokenizer
from tests.api.tiny import ids, tiny_tokenizer

HERE = Path("model.gguf")
ALPHABET = [
    "a",
    "b",
    "c",
    " ",
    "  ",
    "\n",
    "1",
    "23",
    "é",
    "한",
    "👍",
    "👨‍👩‍👧",
    "\t",
    ".",
    "'s",
    "\u0301",
    "½",
]


def _folder(path: Path, **config: Any) -> Checkpoint:
    tiny_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(
        name="x",
        path=path,
        kind="safetensors",
        config={},
        eos_token_ids=(0,),
        bos_token_id=1,
        max_context=64,
        vocab_size=600,
        fingerprint="f",
    )


def _random_texts(n: int) -> list[str]:
    draw = random.Random(17)
    return ["".join(draw.choices(ALPHABET, k=draw.randint(1, 30))) for _ in range(n)]


# ---- folders ----


def test_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        _folder(tmp_path, bos_token={"content": "<|start|>"}, eos_token="<|end|>", chat_template="hi")
    )
    assert tokenizer.encode("hello world").tolist() == ids("hello world")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert tokenizer.settings.chat_templates == {"default": "hi"}
    assert tokenizer.special_ids == {0, 1}


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path, chat_template=[{"name": "default", "template": "old"}])
    assert load_tokenizer(checkpoint).settings.chat_templates == {"default": "old"}
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(checkpoint).settings.chat_templates == {"default": "new"}


@pytest.mark.parametrize(
    ("config", "special", "expected"),
    [
        ({}, True, []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True, [1]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, False, []),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, True, []),
    ],
)
def test_bos_only_where_the_config_says_so(
    tmp_path: Path, config: dict[str, Any], special: bool, expected: list[int]
) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path, bos_token="<|start|>", **config))
    assert tokenizer.encode("hello", special=special).tolist() == expected + ids("hello")


def test_bos_of_the_post_processor(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path, bos_token="<|start|>")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(checkpoint).encode("hello").tolist() == [1, *ids("hello")]
    assert load_tokenizer(checkpoint).encode("hello", special=False).tolist() == ids("hello")
    off = {"bos_token": "<|start|>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(off))
    assert load_tokenizer(checkpoint).encode("hello").tolist() == ids("hello")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(checkpoint)


# ---- GGUF ----


def _byte_level_metadata(**changes: Any) -> dict[str, Any]:
    state = json.loads(tiny_tokenizer().backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "T",
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def test_gguf_byte_level_equals_the_original() -> None:
    tokenizer = tokenizer_from_metadata(_byte_level_metadata(), path=HERE)
    for text in [*_random_texts(500), "<|start|>user\nhello world<|end|>"]:
        assert tokenizer.encode(text).tolist() == ids(text)
        assert tokenizer.decode(ids(text)) == tiny_tokenizer().decode(ids(text))
    assert tokenizer.settings.chat_templates == {"default": "T"}
    assert tokenizer.settings.template_variables["bos_token"] == "<|start|>"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm  12 é!", ["I", "'m", " ", " 12", " é", "!"]),
        ("smollm", "I'm  12 é!", ["I", "'m", "  ", "1", "2", " é", "!"]),
        ("qwen2", "I'M 12\n\nx", ["I", "'M", " ", "1", "2", "\n\n", "x"]),
        ("llama-bpe", "I'M 1234 x\n\ny", ["I", "'M", " ", "123", "4", " x", "\n\n", "y"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ],
)
def test_how_text_is_split(pre: str, text: str, words: list[str]) -> None:
    tokenizer = tokenizer_from_metadata(_byte_level_metadata(pre=pre), path=HERE)
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_gguf_bos() -> None:
    for changes, expected in (
        ({}, []),
        ({"add_bos_token": True}, [1]),
        ({"pre": "llama-bpe"}, [1]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ):
        tokenizer = tokenizer_from_metadata(_byte_level_metadata(**changes), path=HERE)
        assert tokenizer.encode("hello").tolist() == expected + ids("hello")
        assert tokenizer.encode("hello", special=False).tolist() == ids("hello")


def _spm_metadata(pieces: list[str], **changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def _spm_reference(text: str, meta: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE in its plainest form: join the best-scored neighbours until none are left."""
    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    index = {token: i for i, token in enumerate(tokens)}
    parts = list(("▁" + text).replace(" ", "▁"))
    while True:
        joins = [
            (scores[index[left + right]], -i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in index
        ]
        if not joins:
            break
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    result: list[int] = []
    for part in parts:
        result += [index[part]] if part in index else [3 + byte for byte in part.encode()]
    return result


def test_gguf_sentencepiece_equals_a_plain_reference() -> None:
    draw = random.Random(23)
    letters = ["▁", "a", "b", "c", "é"]
    pieces = list(letters)
    while len(pieces) < 60:  # every piece is the union of two earlier ones, as training makes them
        union = draw.choice(pieces) + draw.choice(pieces)
        if union not in pieces and len(union) <= 6:
            pieces.append(union)
    meta = _spm_metadata(pieces[5:] + letters, add_bos_token=False)
    tokenizer = tokenizer_from_metadata(meta, path=HERE)
    for _ in range(1500):
        text = "".join(draw.choices(["a", "b", "c", " ", "é", "한", "👍", "x"], k=draw.randint(1, 16)))
        assert tokenizer.encode(text).tolist() == _spm_reference(text, meta)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_sentencepiece_adds_bos_by_default() -> None:
    tokenizer = tokenizer_from_metadata(_spm_metadata(["▁", "a", "▁a"]), path=HERE)
    assert tokenizer.encode("a").tolist() == [1, 261]
    assert tokenizer.encode("<s>a</s>", special=False).tolist()[0] == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "bert"}, "'bert'; known are"),
        ({"pre": "klingon"}, "'klingon'"),
        ({"tokens": []}, "no vocabulary"),
        ({"merges": None}, "no merges"),
        ({"merges": ["zz qq"]}, "don't fit together"),
        ({"token_type": [1]}, "1 token types"),
    ],
)
def test_bad_gguf_metadata(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        tokenizer_from_metadata(_byte_level_metadata(**changes), path=HERE)


@pytest.mark.slow
def test_default_model_equals_transformers() -> None:
    """transformers' reading of the same file leaves out the splitting of digits that the file names
    (`smollm`), so that step is put into it for texts with digits; all else is its own."""
    from transformers import AutoTokenizer

    from checkpoint.gguf_tokenizer import tokenizer_from_gguf
    from checkpoint.resolve import resolve

    path = resolve("smollm2").path
    ours = tokenizer_from_gguf(path)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = [*_random_texts(3000), "def f(x):\n\treturn  x**2\n\n\n", "Привет, мир!", "ไทย", "日本語"]
    without_digits = [t for t in texts if not any(c.isnumeric() for c in t)]
    assert len(without_digits) > 300
    for text in without_digits:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
    inner = theirs.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer]
    )
    for text in texts:
        encoded = ours.encode(text).tolist()
        assert encoded == inner.encode(text).ids
        assert ours.decode(encoded) == theirs.decode(encoded, skip_special_tokens=True)
