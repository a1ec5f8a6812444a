from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# An import of torch fails, as on a host where only the router is installed.
SCRIPT = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None
import deploy.cli, deploy.launcher, deploy.chat, deploy.info
import router.main_scheduler, router.api.main
import checkpoint.resolve, checkpoint.tokenizer, checkpoint.chat_template
import allocator.factory, proto.codec, settings.load
"""


def test_the_router_and_the_command_need_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_imports_neither_server_nor_model_code() -> None:
    script = "import sys, deploy.cli; print(sorted({'grpc', 'uvicorn', 'numpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
