"""The committed code is what `make proto` makes of proto/worker.proto."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import proto.worker_pb2 as generated

ROOT = Path(generated.__file__).parent.parent
NAMES = ("worker_pb2.py", "worker_pb2.pyi", "worker_pb2_grpc.py", "worker_pb2_grpc.pyi")


def test_generated_code_has_not_drifted(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    plugins = Path(sys.executable).parent
    for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        if not (plugins / plugin).exists() and shutil.which(plugin) is None:
            pytest.skip(f"{plugin} (mypy-protobuf) is not installed")
    (tmp_path / "proto").mkdir()
    shutil.copy(ROOT / "proto" / "worker.proto", tmp_path / "proto")
    outputs = [f"--{kind}_out=." for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    path = f"{plugins}:/usr/bin:/bin"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "proto/worker.proto"],
        cwd=tmp_path,
        env={"PATH": path},
        check=True,
        timeout=60,
    )
    for name in NAMES:
        fresh = (tmp_path / "proto" / name).read_text()
        assert fresh == (ROOT / "proto" / name).read_text(), f"proto/{name} is stale: run `make proto`"
