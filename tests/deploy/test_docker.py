"""Images, compose, scaling and rolling with a real Docker engine.

    QUIRE_TEST_BASE_IMAGE=python:3.11-slim-bookworm pytest -m docker tests/deploy/test_docker.py

Behind a mirror, QUIRE_TEST_BUILD_ARGS has further build arguments (`PIP_INDEX_URL=…`), and
QUIRE_TEST_PROMETHEUS_IMAGE names an image for Prometheus; without one it is not started. Nor is Grafana.
The GPU image takes 6 GB and a compiler's patience: QUIRE_TEST_GPU_IMAGE names one that was built before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from settings.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = os.environ.get("QUIRE_TEST_BASE_IMAGE", "python:3.11-slim-bookworm")
BUILD_ARGS = os.environ.get("QUIRE_TEST_BUILD_ARGS", "").split()
ROUTER_MAX_MB, SLIM_MB = 400, 135
"""The limit, and what the default base takes of it."""


def _why_not() -> str:
    if shutil.which("docker") is None:
        return "needs the docker command"
    for words in (("version",), ("compose", "version")):
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"docker {' '.join(words)}: {(done.stderr or done.stdout).strip()[-200:]}"
    return ""


pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if why := _why_not():
        pytest.skip(why)


def _run(*words: str, env: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, (
        f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout + done.stderr


def _build(name: str) -> str:
    """The tag of the image, built from the ordinary Dockerfile."""
    tag = f"quire-test/{name}"
    arguments = [f"--build-arg={arg}" for arg in (f"BASE_IMAGE={BASE_IMAGE}", "REVISION=test", *BUILD_ARGS)]
    words = ["docker", "build", "-q", "-f", f"deploy/docker/{name}.Dockerfile", "-t", tag, *arguments, "."]
    _run(*words, env={"DOCKER_BUILDKIT": "1"})
    return tag


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    return {name: _build(name) for name in ("router", "worker-cpu")}


@dataclass
class Project:
    """A compose project of one test's own, with router and workers."""

    name: str
    env: dict[str, str]
    port: int
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    def compose(self, *words: str, check: bool = True) -> str:
        return _run("docker", "compose", *words, env=self.env, check=check)

    def quire(self, *words: str, check: bool = True) -> str:
        return _run(sys.executable, "-m", "deploy.cli", *words, env=self.env, check=check)

    def n_live(self) -> int:
        n: int = httpx.get(f"{self.url}/health").json()["replicas_live"]
        return n

    def leftovers(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        lists = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        return [line for words in lists for line in _run("docker", *words, "--filter", label).split()]


@contextlib.contextmanager
def _project(images: dict[str, str], **env: str) -> Iterator[Project]:
    (port,) = free_ports(1)
    name = f"quiretest{os.getpid()}x{port}"
    made = Project(
        name=name,
        port=port,
        env={
            "COMPOSE_PROJECT_NAME": name,
            "QUIRE_HTTP_PORT": str(port),
            "QUIRE_ROUTER_IMAGE": images["router"],
            "QUIRE_WORKER_IMAGE": images["worker-cpu"],
            **env,
        },
    )
    try:
        made.compose("up", "-d", "--no-build", "--wait", "--wait-timeout", "600", "router", "worker")
        yield made
    finally:
        made.compose("down", "-v", "--remove-orphans", "--timeout", "10")
    assert made.leftovers() == []


@pytest.fixture(scope="module")
def fakes(images: dict[str, str]) -> Iterator[Project]:
    """Workers that compute nothing, in containers like any other."""
    with _project(images, QUIRE_ATTENTION="fake", QUIRE_LOG_LEVEL="warning") as made:
        yield made


def test_the_router_image_is_slim(images: dict[str, str]) -> None:
    sizes = {
        tag: int(_run("docker", "image", "inspect", "-f", "{{.Size}}", tag)) / 1e6
        for tag in (images["router"], BASE_IMAGE)
    }
    own_mb = sizes[images["router"]] - sizes[BASE_IMAGE]
    assert own_mb + SLIM_MB < ROUTER_MAX_MB
    has_torch = ["python3", "-c", "import importlib.util as u; print(u.find_spec('torch'))"]
    assert _run(
        "docker", "run", "--rm", "--entrypoint", *has_torch[:1], images["router"], *has_torch[1:]
    ) == ("None\n")


def test_compose_builds_what_it_names(images: dict[str, str]) -> None:
    """The layers are those of the images above."""
    env = {"BASE_IMAGE": BASE_IMAGE, "DOCKER_BUILDKIT": "1", "QUIRE_VERSION": "0.0.1"}
    env |= {name: value for name, _, value in (arg.partition("=") for arg in BUILD_ARGS)}
    built = {"QUIRE_ROUTER_IMAGE": "quire-test/composed", "QUIRE_WORKER_IMAGE": "quire-test/composed-worker"}
    if "BuildKit" in (
        said := _run("docker", "compose", "build", "router", "worker", env=env | built, check=False)
    ):
        pytest.skip(f"compose has no builder here: {said[-200:]}")
    for tag in built.values():
        label = '{{index .Config.Labels "org.opencontainers.image.version"}}'
        assert _run("docker", "image", "inspect", "-f", label, tag).strip() == "0.0.1", said


@pytest.mark.parametrize("name", ["router", "worker-cpu"])
def test_images_are_not_root_and_say_what_they_are(images: dict[str, str], name: str) -> None:
    (inspected,) = json.loads(_run("docker", "image", "inspect", images[name]))
    config = inspected["Config"]
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.revision"] == "test"
    assert not any("secret" in entry.lower() for entry in config["Env"])


def test_the_gpu_image_has_its_kernels_and_says_that_there_is_no_gpu() -> None:
    if not (image := os.environ.get("QUIRE_TEST_GPU_IMAGE")):
        pytest.skip("QUIRE_TEST_GPU_IMAGE names no image")
    said = _run("docker", "run", "--rm", image, check=False)
    assert said.startswith("error: --claim-gpu is on, but there is no NVIDIA GPU for this worker (0 found)")
    said = _run(
        "docker", "run", "--rm", image, "worker", "--no-claim-gpu", "--attention=flashinfer", check=False
    )
    assert "error: --attention flashinfer needs an NVIDIA GPU" in said
    assert "Traceback" not in said
    load = (
        "import glob, torch, flashinfer, tvm_ffi\n"
        "found = glob.glob('/opt/venv/lib/python3*/site-packages/flashinfer/data/aot/*/*.so')\n"
        "print(len(found), all(map(tvm_ffi.load_module, found)))"
    )
    said = _run("docker", "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", load)
    assert re.search(r"^[1-9]\d* True$", said, re.MULTILINE), said
    tools = _run("docker", "run", "--rm", "--entrypoint=sh", image, "-c", "command -v nvcc g++ || true")
    assert tools.strip() == "", "compilers of kernels stay in the build"


def test_up_chat_down(images: dict[str, str]) -> None:
    with _project(images) as project:
        client = openai.OpenAI(base_url=f"{project.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        states = project.compose("ps", "--format", "{{.Service}} {{.Health}}").split("\n")
        assert sorted(filter(None, states)) == ["router healthy", "worker healthy"]


def test_prometheus_scrapes_a_router_with_keys(images: dict[str, str]) -> None:
    if not (image := os.environ.get("QUIRE_TEST_PROMETHEUS_IMAGE")):
        pytest.skip("QUIRE_TEST_PROMETHEUS_IMAGE names no image")
    (port,) = free_ports(1)
    keys = {"QUIRE_API_KEYS": "one,two", "QUIRE_METRICS_KEY": "two"}
    with _project(
        images, QUIRE_ATTENTION="fake", PROMETHEUS_IMAGE=image, PROMETHEUS_PORT=str(port), **keys
    ) as project:
        project.compose("up", "-d", "--no-build", "--wait", "prometheus")
        up: list[Any] = []
        for _ in range(100):
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": "quire_ready"})
            if up := answer.json()["data"]["result"]:
                break
            threading.Event().wait(0.5)  # it scrapes when it pleases
        assert [sample["value"][1] for sample in up] == ["1"]
        assert "live" in project.quire("ps"), "the key is the router's own: nobody hands it around"


def test_compose_scales_and_the_router_finds_the_new_ones(fakes: Project) -> None:
    fakes.compose(
        "up", "-d", "--no-build", "--no-recreate", "--wait", "--scale", "worker=3", "router", "worker"
    )
    table = fakes.quire("ps")
    assert table.count(" live ") == 3, table
    _stream_many(fakes, n=12)
    running = httpx.get(f"{fakes.url}/metrics").text
    cached = [line.split() for line in running.splitlines() if line.startswith("quire_kv_blocks_cached{")]
    assert len(cached) == 3
    assert all(float(value) > 0 for _, value in cached), "all three served"


def test_scaling_by_quire_is_seen_by_compose(fakes: Project) -> None:
    fakes.quire("scale", "2")
    assert fakes.n_live() == 2
    fakes.quire("scale", "3")
    assert fakes.n_live() == 3
    names = fakes.compose("ps", "--services", "--format", "{{.Name}}")
    assert "worker" in names
    listed = fakes.compose("ps", "-q", "worker").split()
    assert len(listed) == 3


def test_rolling_under_load_loses_nothing(fakes: Project) -> None:
    before = set(fakes.compose("ps", "-q", "worker").split())
    load = Load(fakes)
    with load.running():
        fakes.quire("roll")
    after = set(fakes.compose("ps", "-q", "worker").split())
    assert load.errors == []
    assert load.n_ended > 0
    assert len(after) == len(before)
    assert not after & before, "every worker was replaced"


def test_a_worker_killed_under_load_loses_nothing(fakes: Project) -> None:
    load = Load(fakes)
    with load.running():
        victim = fakes.compose("ps", "-q", "worker").split()[0]
        _run("docker", "kill", victim)
        n_then = load.n_ended
        while load.n_ended < n_then + 8 and not load.errors:
            load.progressed.wait(30)
            load.progressed.clear()
    assert load.errors == []


def test_a_worker_that_can_not_start_leaves_no_container(fakes: Project) -> None:
    n_before = len(fakes.compose("ps", "-aq", "worker").split())
    said = fakes.quire("scale", "9", "--start-timeout-s", "1", check=False)
    assert "error: " in said
    assert "did not serve within 1 s" in said or "has ended" in said
    assert len(fakes.compose("ps", "-aq", "worker").split()) == n_before


def test_a_value_that_can_not_be_used_is_named_and_leaves_nothing(images: dict[str, str]) -> None:
    env = {
        "COMPOSE_PROJECT_NAME": f"quiretest{os.getpid()}bad",
        "QUIRE_HTTP_PORT": str(free_ports(1)[0]),
        "QUIRE_ROUTER_IMAGE": images["router"],
        "QUIRE_WORKER_IMAGE": images["worker-cpu"],
        "QUIRE_ATTENTION": "fake",
        "QUIRE_MAX_BATCH_SIZE": "many",
    }
    up = ("docker", "compose", "up", "-d", "--no-build", "--wait", "--wait-timeout", "20", "worker")
    try:
        assert _run(*up, env=env, check=False)
        said = _run("docker", "compose", "logs", "worker", env=env)
    finally:
        _run("docker", "compose", "down", "-v", "--timeout", "10", env=env)
    assert "--max-batch-size is 'many' (from QUIRE_MAX_BATCH_SIZE), but must be a whole number" in said
    label = f"label=com.docker.compose.project={env['COMPOSE_PROJECT_NAME']}"
    assert _run("docker", "ps", "-aq", "--filter", label).strip() == ""


def test_a_taken_port_and_a_wrong_device_are_named(images: dict[str, str], fakes: Project) -> None:
    other = {**fakes.env, "COMPOSE_PROJECT_NAME": f"{fakes.name}b"}
    said = _run("docker", "compose", "up", "-d", "--no-build", "router", env=other, check=False)
    _run("docker", "compose", "down", "-v", env=other)
    assert str(fakes.port) in said
    assert "allocated" in said or "in use" in said
    wrong = _run("docker", "compose", "config", "-q", env={**fakes.env, "QUIRE_DEVICE": "tpu"}, check=False)
    assert "tpu.yml" in wrong


class Load:
    """Streams without a pause; a stream that breaks, is short or is refused is an error."""

    def __init__(self, project: Project, *, n_clients: int = 6, n_tokens: int = 400) -> None:
        self._project = project
        self._n_clients = n_clients
        self._n_tokens = n_tokens
        self._stop = threading.Event()
        self.progressed = threading.Event()
        self.n_ended = 0
        self.errors: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self._n_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _client(self, number: int) -> None:
        i = 0
        while not self._stop.is_set() and not self.errors:
            i += 1
            try:
                n = _stream(self._project, f"{number} {i} ", n_tokens=self._n_tokens)
                if n != self._n_tokens:
                    self.errors.append(f"{n} of {self._n_tokens} tokens came")
                self.n_ended += 1
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.progressed.set()
        self.progressed.set()


def _stream(project: Project, prompt: str, *, n_tokens: int) -> int:
    """Tokens of one streamed answer, as the server counted them."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "prompt": prompt * 30,
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    n = 0
    with httpx.stream("POST", f"{project.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if event.get("usage"):
                    n = event["usage"]["completion_tokens"]
        assert line is not None
    return n


def _stream_many(project: Project, *, n: int) -> None:
    threads = [
        threading.Thread(target=_stream, args=(project, f"{i} "), kwargs={"n_tokens": 50}) for i in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
