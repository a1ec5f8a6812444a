from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import launcher
from deploy.banner import base_url
from deploy.child import ChildSpec
from deploy.errors import NoGpuError, PortTakenError
from deploy.gpu_list import Gpu
from deploy.launcher import LaunchPlan, child_specs, launch
from deploy.ports import check_free
from deploy.run_dir import run_dir
from router.api.server import listen
from router.config import RouterConfig
from settings.errors import ConfigError
from settings.ports import free_ports
from worker.config import WorkerConfig


def _specs(
    settings: dict[str, str | None], *, n_workers: int, n_api: int = 1, folder: Path = Path("/run/x")
) -> dict[str, ChildSpec]:
    plan = LaunchPlan(settings=settings, n_workers=n_workers, n_api=n_api, start_timeout_s=7)
    worker = WorkerConfig() if n_workers else None
    specs = child_specs(plan, router=RouterConfig(port=8123), worker=worker, folder=folder)
    return {spec.name: spec for spec in specs}


def _value(spec: ChildSpec, option: str) -> str:
    return next(word.partition("=")[2] for word in spec.argv if word.startswith(option + "="))


def test_processes_of_a_server_find_each_other() -> None:
    specs = _specs({}, n_workers=2)
    assert list(specs) == ["scheduler", "api", "worker 0", "worker 1"]
    for name in ("scheduler", "api"):
        assert _value(specs[name], "--scheduler-address") == "unix:/run/x/scheduler.sock"
        assert _value(specs[name], "--port") == "8123"
    replicas = _value(specs["scheduler"], "--replicas").split(",")
    ports = [_value(specs[name], "--port") for name in ("worker 0", "worker 1")]
    assert replicas == [f"127.0.0.1:{port}" for port in ports]
    assert len(set(ports)) == 2
    assert all(spec.ready_limit_s == 7 for spec in specs.values())


def test_the_api_ends_first_and_the_workers_last() -> None:
    specs = _specs({}, n_workers=1)
    assert specs["api"].stage < specs["scheduler"].stage < specs["worker"].stage
    assert specs["api"].grace_s > RouterConfig().shutdown_grace_s


def test_settings_reach_whom_they_concern() -> None:
    specs = _specs(
        {"max_batch_prefill_tokens": "64", "dtype": "float32", "max_n": "3", "host": "0.0.0.0"}, n_workers=1
    )
    assert _value(specs["scheduler"], "--max-batch-prefill-tokens") == "64"
    assert _value(specs["worker"], "--max-batch-prefill-tokens") == "64"
    assert _value(specs["worker"], "--dtype") == "float32"
    assert _value(specs["worker"], "--host") == "127.0.0.1", "--host is the HTTP server's"
    assert _value(specs["api"], "--max-n") == "3"
    assert not any("dtype" in word for word in specs["api"].argv)


def test_workers_share_the_cores() -> None:
    n_cores = len(os.sched_getaffinity(0))
    many = _specs({}, n_workers=n_cores + 1)
    assert _value(many["worker 0"], "--threads") == "1"
    assert not any("--threads" in word for word in _specs({}, n_workers=1)["worker"].argv)


def test_api_processes_share_the_port() -> None:
    specs = _specs({}, n_workers=1, n_api=2)
    assert "--share-port" in specs["api 0"].argv
    assert specs["api 0"].argv == specs["api 1"].argv
    assert "--share-port" not in _specs({}, n_workers=1)["api"].argv


def test_a_router_alone_keeps_its_replicas_and_its_address() -> None:
    specs = _specs({"replicas": "a:1,b:2"}, n_workers=0)
    assert list(specs) == ["scheduler", "api"]
    assert _value(specs["scheduler"], "--replicas") == "a:1,b:2"
    assert _value(specs["api"], "--scheduler-address") == "unix:/run/x/scheduler.sock"
    given = _specs({"scheduler_address": "127.0.0.1:9"}, n_workers=0)
    assert _value(given["api"], "--scheduler-address") == "127.0.0.1:9"


def test_secrets_never_reach_a_command_line() -> None:
    specs = _specs({"api_keys": "hunter2"}, n_workers=1)
    assert not any("hunter2" in word for spec in specs.values() for word in spec.argv)


def test_a_taken_port_is_named_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken .* --port"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(PortTakenError, match=r"can't listen on 192\.0\.2\.1 port 80 \(--host, --port\)"):
        check_free("192.0.2.1", 80)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_port_is_tried_at_the_address_that_the_server_will_take(host: str) -> None:
    with listen(host, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on {host} is taken"):
            check_free(host, port)


def test_a_host_that_is_none() -> None:
    with pytest.raises(PortTakenError, match=r"--host|Name or service not known"):
        check_free("a" * 70 + ".example", 80)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_where_a_client_on_this_host_reaches_the_api(host: str, url: str) -> None:
    assert base_url(RouterConfig(host=host)) == url


def test_a_closed_standard_output_does_not_end_the_server() -> None:
    code = (
        "from deploy.launcher import _show\n_show('Ready', say=lambda _, line: print(line, file=sys.stderr))"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys\n{code}"],
            cwd=Path(__file__).parents[2],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        0,
        "can't write to standard output: [Errno 28] No space left on device\n",
    )


def test_free_ports_differ() -> None:
    assert len(set(free_ports(5))) == 5


def test_a_run_folder_is_private_and_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if len(str(tmp_path)) <= 60 else "")
    with run_dir() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "scheduler.sock")) < 107
    assert not folder.exists()


def test_folders_of_killed_launches_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        dead, alive, other = (
            Path(base) / name for name in ("quire-999999999-a", f"quire-{os.getpid()}-b", "quire-notes")
        )
        for folder in (dead, alive, other):
            folder.mkdir()
        with run_dir():
            assert not dead.exists()
            assert alive.exists()
            assert other.exists()


def test_workers_on_gpus_claim_one_each_and_keep_all_threads() -> None:
    plan = LaunchPlan(settings={"gpu_lock_dir": "/locks"}, n_workers=2, n_api=1, start_timeout_s=7)
    specs = child_specs(
        plan, router=RouterConfig(), worker=WorkerConfig(), folder=Path("/run/x"), on_gpus=True
    )
    workers = [spec for spec in specs if spec.name.startswith("worker")]
    for spec in workers:
        assert "--claim-gpu" in spec.argv
        assert _value(spec, "--gpu-lock-dir") == "/locks"
        assert not any("--threads" in word for word in spec.argv)
    assert not any("--claim-gpu" in spec.argv for spec in specs if spec not in workers)


def _with_gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    gpus = tuple(Gpu(uuid=f"GPU-{i}", index=i, name="H200") for i in range(n))
    monkeypatch.setattr(launcher, "present_gpus", lambda: gpus)
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: object())


def test_a_launch_with_too_few_gpus_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpus(monkeypatch, 2)
    plan = LaunchPlan(settings={"port": "0", "model": "x"}, n_workers=3, n_api=1, start_timeout_s=7)
    with pytest.raises(NoGpuError, match=r"--workers is 3, but there are 2 GPUs \(2 found\)"):
        launch(plan, env={})
    with pytest.raises(NoGpuError, match=r"there is 1 GPU \(CUDA_VISIBLE_DEVICES is 1\)"):
        launch(plan, env={"CUDA_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize(
    ("attention", "n_gpus", "on_gpus"),
    [("auto", 2, True), ("flashinfer", 2, True), ("torch", 2, False), ("fake", 2, False), ("auto", 0, False)],
)
def test_which_workers_go_to_gpus(
    monkeypatch: pytest.MonkeyPatch, attention: str, n_gpus: int, on_gpus: bool
) -> None:
    _with_gpus(monkeypatch, n_gpus)
    plan = LaunchPlan(settings={}, n_workers=2, n_api=1, start_timeout_s=7)
    assert launcher._on_gpus(WorkerConfig(attention=attention), plan, env={}) is on_gpus


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": "here:there"}, "--replicas has 'here:there', but an entry must be host:port"),
        ({"scheduler_address": "here"}, "--scheduler-address is 'here', but must be unix:/path or host:port"),
    ],
)
def test_a_routers_addresses_are_judged_before_anything_starts(
    settings: dict[str, str | None], words: str
) -> None:
    plan = LaunchPlan(settings={**settings, "port": "0"}, n_workers=0, n_api=1, start_timeout_s=7)
    with pytest.raises(ConfigError, match=words):
        launch(plan, env={})


def test_an_address_for_traces_is_judged_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "child_specs", lambda *_, **__: pytest.fail("a process was to be started"))
    plan = LaunchPlan(
        settings={"otlp_endpoint": "collector:4318", "port": "0"}, n_workers=0, n_api=1, start_timeout_s=1
    )
    with pytest.raises(ConfigError, match="--otlp-endpoint is 'collector:4318', but must be a URL"):
        launch(plan, env={})
