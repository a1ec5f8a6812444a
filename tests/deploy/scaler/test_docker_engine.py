"""The engine's JSON, without an engine."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from deploy.scaler.commands import Limits, rescale
from deploy.scaler.container_config import address_of, twin, uses_gpus
from deploy.scaler.docker_engine import DockerEngine, DockerRouter, connect
from deploy.scaler.model import ScaleError
from settings.errors import ConfigError

OLD = {
    "Id": "sha256:old",
    "Config": {
        "Env": ["PATH=/opt/venv/bin", "FLAVOUR=old"],
        "Entrypoint": ["python3", "-m", "deploy.cli"],
        "Cmd": ["worker"],
        "User": "10001:10001",
        "Labels": {"org.opencontainers.image.version": "0.1.0"},
    },
}
NEW = {"Id": "sha256:new", "Config": {}}


def container(number: int = 1, *, status: str = "running", env: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "Id": f"{number}" * 64,
        "Name": f"/quire-worker-{number}",
        "Image": "sha256:old",
        "State": {"Status": status},
        "Config": {
            **OLD["Config"],  # type: ignore[dict-item]  # a dict
            "Image": "quire/worker-cpu:0.1.0",
            "Hostname": "1" * 12,
            "Cmd": ["worker", "--threads=1"],
            "Env": ["PATH=/opt/venv/bin", "FLAVOUR=old", "QUIRE_MODEL=smollm2", *env],
            "Labels": {
                "org.opencontainers.image.version": "0.1.0",
                "com.docker.compose.project": "quire",
                "com.docker.compose.service": "worker",
                "com.docker.compose.container-number": str(number),
                "com.docker.compose.image": "sha256:old",
            },
            "StopTimeout": 75,
        },
        "HostConfig": {"ReadonlyRootfs": True, "DeviceRequests": None},
        "NetworkSettings": {
            "Networks": {
                "quire_default": {
                    "Aliases": [f"quire-worker-{number}", "worker", f"{number}" * 12],
                    "IPAddress": f"172.18.0.{number}",
                }
            }
        },
    }


def test_a_twin_keeps_what_was_asked_for_and_takes_the_rest_from_its_image() -> None:
    order = twin(container(), old_image=OLD, new_image=NEW, number=2)
    assert order["Env"] == ["QUIRE_MODEL=smollm2"]
    assert order["Cmd"] == ["worker", "--threads=1"]
    assert "Entrypoint" not in order
    assert "User" not in order
    assert "Hostname" not in order, "it is the container's own id"
    assert order["Labels"] == {
        "com.docker.compose.project": "quire",
        "com.docker.compose.service": "worker",
        "com.docker.compose.container-number": "2",
        "com.docker.compose.image": "sha256:new",
    }
    assert order["Image"] == "quire/worker-cpu:0.1.0"
    assert order["HostConfig"] == {"ReadonlyRootfs": True, "DeviceRequests": None}
    assert order["NetworkingConfig"] == {"EndpointsConfig": {"quire_default": {"Aliases": ["worker"]}}}
    json.dumps(order)


def test_where_the_router_finds_it() -> None:
    assert address_of(container(3), default_port=50051) == "172.18.0.3:50051"
    assert address_of(container(3, env=("QUIRE_PORT=7",)), default_port=50051) == "172.18.0.3:7"
    stopped = container()
    stopped["NetworkSettings"]["Networks"]["quire_default"]["IPAddress"] = ""
    assert address_of(stopped, default_port=50051) == ""


def test_gpus_are_seen_in_what_was_asked_for() -> None:
    with_gpus = container()
    with_gpus["HostConfig"]["DeviceRequests"] = [{"Driver": "nvidia", "Count": -1}]
    assert uses_gpus(with_gpus)
    assert not uses_gpus(container())


def _client(*attrs: dict[str, Any]) -> Any:
    made = [
        types.SimpleNamespace(
            id=one["Id"],
            name=one["Name"].lstrip("/"),
            status=one["State"]["Status"],
            labels=one["Config"]["Labels"],
            attrs=one,
        )
        for one in attrs
    ]

    def listed(*, all: bool, filters: dict[str, list[str]]) -> list[Any]:
        assert all
        wanted = dict(label.split("=") for label in filters["label"])
        return [c for c in made if all_in(wanted, c.labels)]

    return types.SimpleNamespace(containers=types.SimpleNamespace(list=listed))


def all_in(wanted: dict[str, str], labels: dict[str, str]) -> bool:
    return wanted.items() <= labels.items()


def test_workers_are_listed_by_number_and_one_off_runs_left_out() -> None:
    one_off = container(9)
    one_off["Config"]["Labels"]["com.docker.compose.oneoff"] = "True"
    engine = DockerEngine(_client(container(2), container(1, status="exited"), one_off), project="quire")
    assert [(w.number, w.running) for w in engine.workers()] == [(1, False), (2, True)]
    assert engine.n_gpus() is None


def test_a_project_without_workers_or_router_says_how_to_begin() -> None:
    engine = DockerEngine(_client(), project="nothing")
    with pytest.raises(ScaleError, match=r"project 'nothing' has no worker .*docker compose up"):
        engine.start()
    with pytest.raises(ScaleError, match=r"project 'nothing' has no running router"):
        engine.router()


def test_the_router_is_asked_from_inside() -> None:
    asked: list[list[str]] = []

    def exec_run(words: list[str], *, demux: bool) -> Any:
        asked.append(words)
        if "/admin/state" in words:
            answer = {"ready": True, "reason": "", "n_waiting": 0, "oldest_wait_s": 0.0, "replicas": []}
            return types.SimpleNamespace(exit_code=0, output=(json.dumps(answer).encode(), None))
        return types.SimpleNamespace(exit_code=1, output=(None, b"no live worker has the address 'a:1'\n"))

    router = DockerRouter(types.SimpleNamespace(exec_run=exec_run, name="quire-router-1"))
    assert router.state().ready
    with pytest.raises(ScaleError, match="router quire-router-1 can't be asked: no live worker"):
        router.drain("a:1", on=True)
    assert asked[1] == [
        "python3",
        "-m",
        "deploy.ask",
        "POST",
        "/admin/replicas/drain",
        '{"address": "a:1", "on": true}',
    ]


def test_an_answer_that_the_engine_lost_is_asked_for_again() -> None:
    state = {"ready": True, "reason": "", "n_waiting": 0, "oldest_wait_s": 0.0, "replicas": []}
    answers: list[Any] = [(0, (None, None)), (None, (None, None)), (0, (json.dumps(state).encode(), None))]

    def exec_run(words: list[str], *, demux: bool) -> Any:
        code, output = answers.pop(0)
        return types.SimpleNamespace(exit_code=code, output=output)

    router = DockerRouter(types.SimpleNamespace(exec_run=exec_run, name="r"))
    assert router.state().ready
    answers[:] = [(0, (None, None))] * 9
    with pytest.raises(ScaleError, match="can't be asked: the engine gave no answer"):
        router.state()


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ScaleError, match=r"engine can't be reached .*DOCKER_HOST"):
        connect()


def test_what_was_typed_is_checked_before_the_engine_is_asked() -> None:
    limits = Limits(
        n_min=1, n_max=None, up_wait_s=2, up_kv=0.9, up_after_s=5, down_load=0.6, down_after_s=300
    )
    with pytest.raises(ConfigError, match="is 'many', but must be a whole number or `auto`"):
        rescale("many", project="quire", limits=limits, start_s=1, drain_s=1)
    with pytest.raises(ConfigError, match="--max is unset"):
        limits.policy(n_gpus=None)
    assert limits.policy(n_gpus=3).n_max == 3
