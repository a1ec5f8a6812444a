"""The installer's decisions, with stand-ins for Python and pip: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Plays the interpreter of a host and, copied into a "venv", the one inside it; notes what pip is asked.
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit 0 ;;
    *"import ensurepip"*) [ -z "$NO_VENV" ] ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version"*) exit 0 ;;
    "-m pip"*) echo "$*" >>"$PIP_LOG" ;;
    "- "*) [ -n "$INDEX_ANSWERS" ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "install.sh", folder / "deploy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def _install(checkout: Path, extra: str = "worker", **env: str) -> tuple[int, str, list[str]]:
    """(exit code, what it said, pip's command lines)."""
    log = checkout / "pip.log"
    log.unlink(missing_ok=True)
    python = str(checkout.parent / "python3")
    base = {"PATH": os.environ["PATH"], "PYTHON": python, "PIP_LOG": str(log)}
    done = subprocess.run(
        ["sh", "deploy/install.sh", str(checkout / "venv"), extra],
        cwd=checkout,
        env={**base, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stderr, lines


needs_no_gpu = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None, reason="this host has a GPU"
)


@needs_no_gpu
def test_without_a_gpu_torch_comes_from_the_cpu_index_when_it_answers(checkout: Path) -> None:
    code, _, lines = _install(checkout, INDEX_ANSWERS="1")
    assert code == 0
    assert "--extra-index-url https://download.pytorch.org/whl/cpu -r requirements/torch-cpu.txt" in lines[0]
    assert lines[1].endswith("--editable .[worker]")


@needs_no_gpu
def test_without_that_index_the_ordinary_one_serves(checkout: Path) -> None:
    _, said, lines = _install(checkout)
    assert "index: default" in said
    assert "--extra-index-url" not in lines[0]


@needs_no_gpu
def test_the_index_can_be_chosen(checkout: Path) -> None:
    _, _, lines = _install(checkout, INDEX_ANSWERS="1", TORCH_INDEX="https://mirror.example/cpu")
    assert "--extra-index-url https://mirror.example/cpu" in lines[0]
    shutil.rmtree(checkout / "venv")
    _, _, lines = _install(checkout, INDEX_ANSWERS="1", TORCH_INDEX="default")
    assert "--extra-index-url" not in lines[0]


def test_with_a_gpu_the_hosts_torch_is_left_alone(checkout: Path) -> None:
    _, _, lines = _install(checkout, extra="gpu", INDEX_ANSWERS="1")
    assert len(lines) == 1
    assert lines[0].endswith("--editable .[gpu]")


def test_a_second_run_does_nothing_until_something_changes(checkout: Path) -> None:
    assert _install(checkout)[2]
    assert _install(checkout) == (0, "", [])
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert _install(checkout)[2]


def test_the_development_environment_serves_the_worker_too(checkout: Path) -> None:
    _install(checkout, extra="dev")
    assert _install(checkout, extra="worker") == (0, "", [])
    assert _install(checkout, extra="gpu")[2]


def test_a_missing_venv_module_is_told_with_its_remedy(checkout: Path) -> None:
    code, said, _ = _install(checkout, NO_VENV="1")
    assert code == 1
    assert "apt-get install python3-venv" in said


def test_a_python_that_does_not_fit_is_named(checkout: Path) -> None:
    code, said, _ = _install(checkout, PYTHON="/bin/false")
    assert code == 1
    assert "PYTHON=/bin/false is not a working Python 3.11 or 3.12" in said


def test_make_takes_an_environment_whose_path_has_spaces() -> None:
    """`make -n` prints the commands that it would run."""
    for target, command in (("run", 'exec "a b/venv/bin/quire" serve'), ("docs", '"a b/venv/bin/python" -m')):
        done = subprocess.run(
            ["make", "-n", target, "VENV=a b/venv"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert command in done.stdout
