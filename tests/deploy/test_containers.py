"""What can be said of images and the compose file without an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deploy.docker.requirements_of import requirements
from deploy.gpu_claim import ClaimConfig
from router.config import RouterConfig
from settings.load import settings_of
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
COMPOSE = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy" / "compose").glob("*.yml"))]
_VARIABLE = re.compile(r"\$\{([A-Z_]+)")


def test_there_is_an_image_for_each_part() -> None:
    assert [path.stem for path in DOCKERFILES] == ["router", "worker-cpu", "worker-gpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text()
    final = text[text.rindex("\nFROM ") :]
    assert "# syntax" not in text, "it would pull a frontend"
    assert "ARG BASE_IMAGE=" in text
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE)
    assert {source for source, _ in stages} <= {"${BASE_IMAGE}", *(name for _, name in stages)}
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE), "never root"
    assert "\nHEALTHCHECK " in final
    assert "org.opencontainers.image.version" in final
    for secret in ("pip_conf", "ca_bundle"):
        assert f"--mount=type=secret,id={secret}" in text
    assert "constraints.txt" in text, "versions are pinned"
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_sent_to_the_engine(path: Path) -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in rules if line.startswith("!")}
    held_back = {line for line in rules if line.startswith("deploy/")}
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE):
        for name in source.split():
            assert name.split("/")[0] in sent
            assert not any(name.startswith(line) for line in held_back)


def test_the_router_needs_no_torch() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    router, worker, gpu = (requirements(pyproject, extras) for extras in ([], ["worker"], ["gpu"]))
    assert not any(re.match(r"torch|transformers|safetensors", line) for line in router)
    assert any(line.startswith("torch>") for line in worker)
    assert {line.split(">")[0] for line in gpu} >= {"torch", "transformers", "flashinfer-python"}
    with pytest.raises(KeyError):
        requirements(pyproject, ["nothing"])


def test_every_variable_of_the_compose_files_is_explained() -> None:
    example = (ROOT / ".env.example").read_text()
    explained = set(re.findall(r"^#([A-Z_]+)=", example, re.MULTILINE))
    used = {name for path in COMPOSE for name in _VARIABLE.findall(path.read_text())}
    overrides = {name for name in used if name.endswith("_IMAGE") and name != "BASE_IMAGE"}
    assert used - overrides - {"COMPOSE_PROJECT_NAME"} == explained
    assert not re.search(r"^[A-Z]", example, re.MULTILINE), "a copy of it changes nothing"


def test_the_containers_are_told_settings_that_exist() -> None:
    known = {
        name
        for config in (RouterConfig, WorkerConfig, ClaimConfig)
        for setting in settings_of(config)
        for name in setting.env_names
    }
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            names = service.get("environment", {})
            assert {name for name in names if name.startswith("QUIRE_")} <= known


def test_both_devices_give_a_worker() -> None:
    compose = yaml.safe_load(COMPOSE[0].read_text())
    assert compose["services"]["worker"]["extends"]["file"] == "deploy/compose/${QUIRE_DEVICE:-cpu}.yml"
    for device in ("cpu", "gpu"):
        extended = yaml.safe_load((ROOT / "deploy" / "compose" / f"{device}.yml").read_text())
        assert set(extended["services"]) == {"worker"}
