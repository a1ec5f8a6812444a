"""The official client for Node (npm's `openai`) against the real server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.api.live import serving
from tests.api.test_frameworks import CITY, framework_scheduler
from tests.api.tools.test_chat_tools import HERMES

pytestmark = pytest.mark.slow

CLIENT = "openai@7.59.0"
SCRIPT = Path(__file__).with_name("node_client.mjs")
INSTALL_WITHIN_S = 120


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder, kept between runs, whose node_modules have the client."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "quire" / "tests" / CLIENT
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", ".", CLIENT]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm could not install {CLIENT} within {INSTALL_WITHIN_S} s")
        if done.returncode:
            pytest.skip(f"npm can't install {CLIENT}: {done.stderr.strip()[-200:]}")
    return folder


async def test_node_client(installed: Path, tmp_path: Path) -> None:
    # Node looks for packages beside the script.
    script = tmp_path / SCRIPT.name
    shutil.copy(SCRIPT, script)
    (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    async with serving(framework_scheduler(), template=HERMES) as live:
        process = await asyncio.create_subprocess_exec(
            "node", str(script), live.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out)
    assert (found["chat"], found["streamed"]) == ("hello world", "hello world")
    assert found["usage"] == found["streamedUsage"] > 0
    assert found["call"]["name"] == "weather"
    assert json.loads(found["call"]["arguments"]) == json.loads(CITY)
    assert found["finish"] == "tool_calls"
    assert found["parsed"] == json.loads(CITY)
    assert (found["response"], found["completion"]) == ("hello world", "hello world")
    assert found["events"][0] == "response.created"
    assert found["events"][-1] == "response.completed"
    assert found["models"] == ["org/tiny"]
    assert found["error"] == ["BadRequestError", 400, "temperature"]
