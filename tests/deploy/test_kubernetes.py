"""The manifests against the cluster's own schemas, and against what the rest of the project says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.gpu_claim import ClaimConfig
from router.config import RouterConfig
from settings.load import settings_of
from worker.config import WorkerConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
OVERLAYS = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))
OLDEST, NEWEST = "1.31", "1.34"
CUSTOM = {"PodMonitor"}
"""Kinds that a cluster learns from an operator: there is no schema for them here."""

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (kustomize)")


def _documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def _all() -> dict[str, dict[str, Any]]:
    found = [document for path in FILES for document in _documents(path.read_text())]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in found}


ALL = _all()


def _pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = ALL[name]["spec"]["template"]["spec"]
    return spec


def _check(document: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    if document["kind"] not in CUSTOM:
        validate(document, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", ALL)
def test_every_manifest_fits_the_schemas(name: str, version: str) -> None:
    _check(ALL[name], version)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_overlay_builds_and_fits_the_schemas(overlay: Path) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    documents = _documents(built.stdout)
    assert documents
    for document in documents:
        _check(document, NEWEST)


@needs_kubectl
def test_gpu_workers_have_a_gpu_each_and_nothing_else_changes() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "gpu")], capture_output=True, text=True, check=True
    )
    (worker,) = (d for d in _documents(built.stdout) if d["kind"] == "StatefulSet")
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("quire/worker-gpu:")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (before,) = _pod("StatefulSet/quire-worker")["containers"]
    assert container["readinessProbe"] == before["readinessProbe"]


def test_a_worker_has_one_router() -> None:
    router = ALL["Deployment/quire-router"]["spec"]
    assert router["replicas"] == 1
    assert router["strategy"] == {"type": "Recreate"}


def test_pods_are_not_told_of_services_by_environment() -> None:
    for name in ("Deployment/quire-router", "StatefulSet/quire-worker"):
        pod = _pod(name)
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def test_the_router_finds_the_workers() -> None:
    service = ALL["Service/quire-worker"]["spec"]
    assert service["clusterIP"] == "None"
    worker = ALL["StatefulSet/quire-worker"]["spec"]
    assert worker["serviceName"] == "quire-worker"
    assert service["selector"] == worker["selector"]["matchLabels"]
    (router,) = _pod("Deployment/quire-router")["containers"]
    env = {entry["name"]: entry.get("value") for entry in router["env"]}
    assert env["QUIRE_REPLICAS"] == f"dns:///quire-worker:{service['ports'][0]['port']}"


def test_the_settings_exist() -> None:
    known = {
        name
        for config in (RouterConfig, WorkerConfig, ClaimConfig)
        for setting in settings_of(config)
        for name in setting.env_names
    }
    for name in ("Deployment/quire-router", "StatefulSet/quire-worker"):
        for container in _pod(name)["containers"]:
            for entry in container["env"]:
                assert entry["name"] in known | {"HF_TOKEN"}


def test_what_watches_and_scales_points_at_what_is_there() -> None:
    target = ALL["HorizontalPodAutoscaler/quire-worker"]["spec"]["scaleTargetRef"]
    assert f"{target['kind']}/{target['name']}" in ALL
    budget = ALL["PodDisruptionBudget/quire-worker"]["spec"]
    assert budget["selector"] == ALL["StatefulSet/quire-worker"]["spec"]["selector"]
    monitor = ALL["PodMonitor/quire-router"]["spec"]
    assert monitor["selector"] == ALL["Deployment/quire-router"]["spec"]["selector"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (router,) = _pod("Deployment/quire-router")["containers"]
    assert endpoint["port"] in {port["name"] for port in router["ports"]}
    assert endpoint["path"] == "/metrics"
