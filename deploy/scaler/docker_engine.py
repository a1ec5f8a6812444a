"""Worker containers of a compose project, through the Docker SDK. Those made here carry compose's own labels:
`docker compose ps`, `logs` and `down` see them like any other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from deploy.gpu_devices import present_gpus
from deploy.health import WORKER_PORT
from deploy.scaler.container_config import NUMBER, address_of, twin, uses_gpus
from deploy.scaler.model import RouterState, ScaleError, Worker

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
ONE_OFF = "com.docker.compose.oneoff"
_N_LOG_LINES = 30
_STOP_S = 75
_N_TRIES = 4


class DockerEngine:
    """Implements `Engine`. `client` is a docker.DockerClient."""

    def __init__(self, client: Any, *, project: str, service: str = "worker") -> None:
        self._client = client
        self._project = project
        self._service = service

    def workers(self) -> list[Worker]:
        with _engine_errors():
            return sorted(map(_worker, self._containers(self._service)), key=lambda worker: worker.number)

    def start(self) -> Worker:
        with _engine_errors():
            containers = self._containers(self._service)
            if not containers:
                raise ScaleError(
                    f"project {self._project!r} has no {self._service} to take as a model: `docker compose "
                    "up` starts the first (--project names another project)"
                )
            model = max(containers, key=lambda container: (container.status == "running", _number(container)))
            taken = {_number(container) for container in containers}
            number = next(i for i in range(1, len(taken) + 2) if i not in taken)
            images = self._client.images
            order = twin(
                model.attrs,
                old_image=images.get(model.attrs["Image"]).attrs,
                new_image=images.get(model.attrs["Config"]["Image"]).attrs,
                number=number,
            )
            name = f"{self._project}-{self._service}-{number}"
            created = self._client.api.create_container_from_config(order, name)
            try:
                self._client.api.start(created["Id"])
            except BaseException:
                self._client.api.remove_container(created["Id"], force=True)
                raise
            return _worker(self._client.containers.get(created["Id"]))

    def remove(self, worker: Worker) -> None:
        import docker.errors

        with _engine_errors(), contextlib.suppress(docker.errors.NotFound):
            container = self._client.containers.get(worker.id)
            container.stop(timeout=container.attrs["Config"].get("StopTimeout") or _STOP_S)
            container.remove()

    def last_words(self, worker: Worker) -> str:
        with _engine_errors():
            text = self._client.containers.get(worker.id).logs(tail=_N_LOG_LINES).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        words: str = (errors or lines or ["it has said nothing"])[-1]
        return words.removeprefix("error:").strip()

    def n_gpus(self) -> int | None:
        with _engine_errors():
            containers = self._containers(self._service)
        if not any(uses_gpus(container.attrs) for container in containers):
            return None
        # 0: this tool runs where the driver's library is not; the workers find out by themselves.
        return len(present_gpus()) or None

    def router(self) -> DockerRouter:
        """Raises ScaleError when the project has none that runs."""
        with _engine_errors():
            running = [c for c in self._containers("router") if c.status == "running"]
        if not running:
            raise ScaleError(
                f"project {self._project!r} has no running router: `docker compose up -d` starts it "
                "(--project names another project)"
            )
        return DockerRouter(running[0])

    def _containers(self, service: str) -> list[Any]:
        labels = [f"{PROJECT}={self._project}", f"{SERVICE}={service}"]
        found = self._client.containers.list(all=True, filters={"label": labels})
        return [container for container in found if container.labels.get(ONE_OFF) != "True"]


class DockerRouter:
    """Implements `Router` by asking from inside its container: admin routes are not open to other hosts."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def state(self) -> RouterState:
        return RouterState.read(json.loads(self._ask("GET", "/admin/state")))

    def drain(self, address: str, *, on: bool) -> None:
        self._ask("POST", "/admin/replicas/drain", json.dumps({"address": address, "on": on}))

    def _ask(self, *words: str) -> str:
        """All questions may be asked twice: a busy engine now and then loses what a command printed, or has
        no exit code for it."""
        err = ""
        for _ in range(_N_TRIES):
            with _engine_errors():
                done = self._container.exec_run(["python3", "-m", "deploy.ask", *words], demux=True)
            out, err = (part.decode(errors="replace").strip() if part else "" for part in done.output)
            if done.exit_code == 0 and out:
                return str(out)
            if done.exit_code:
                break
        raise ScaleError(
            f"the router {self._container.name} can't be asked: {err or 'the engine gave no answer'}"
        )


def connect() -> Any:
    """A Docker client. Raises ScaleError when there is no engine, or no library for it."""
    try:
        import docker
        import docker.errors
    except ImportError:
        raise ScaleError("scaling needs the Docker library: pip install '.[scale]' in a checkout") from None
    try:
        client = docker.from_env(timeout=120)
        client.ping()
    except docker.errors.DockerException as error:
        raise ScaleError(
            f"the Docker engine can't be reached ({error}): is it running, and may you use it? DOCKER_HOST "
            "names another one"
        ) from None
    return client


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    import docker.errors
    import requests

    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise ScaleError(f"an image is gone: {error.explanation or error}; build or pull it first") from error
    except docker.errors.APIError as error:
        raise ScaleError(f"the Docker engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise ScaleError(f"the Docker engine can't be reached: {error}") from error


def _number(container: Any) -> int:
    text = container.labels.get(NUMBER, "0")
    return int(text) if text.isdigit() else 0


def _worker(container: Any) -> Worker:
    attrs = container.attrs
    return Worker(
        id=container.id,
        name=container.name,
        number=_number(container),
        address=address_of(attrs, default_port=WORKER_PORT),
        running=container.status == "running",
        status=container.status,
        image=attrs["Config"]["Image"],
    )
