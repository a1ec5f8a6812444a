"""Rules and dashboards before a real Prometheus, which scrapes a real server under load."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.dashboards.files import FOLDER
from settings.ports import free_ports
from tests.e2e.serving import serving

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
READY_WITHIN_S = 60.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian: apt-get install prometheus)",
)


def _promtool(*words: str, cwd: Path = RULES) -> str:
    done = subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
def test_the_rules_and_their_tests() -> None:
    _promtool("check", "rules", "recording.rules.yml", "alerts.rules.yml")
    _promtool("test", "rules", "alerts.test.yml")


@needs_prometheus
def test_the_configuration(tmp_path: Path) -> None:
    _promtool("check", "config", str(_config(tmp_path, target="router:8000")))


def test_every_alert_is_explained_to_operators() -> None:
    alerts = [rule["alert"] for rule in _rules("alerts.rules.yml")]
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [name for name in alerts if f"`{name}`" not in page] == []


def _rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _config(folder: Path, *, target: str) -> Path:
    """The shipped configuration at a test's pace, with another target."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    key = folder / "metrics_key"
    key.write_text("none")
    scrape["authorization"]["credentials_file"] = str(key)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Has scraped a server with two fake workers while requests ran, were refused and failed."""
    folder = tmp_path_factory.mktemp("monitoring")
    port = free_ports(1)[0]
    flags = ("--attention=fake", "--fake-step-ms=2", "--max-concurrent-requests=64")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(folder, workers=2, flags=flags))
        log = stack.enter_context((folder / "prometheus.log").open("w"))
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={_config(folder, target=f'127.0.0.1:{server.port}')}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10))
        _load(server.url, until=lambda: _n_scrapes(client) >= 8)
        yield client


def _load(url: str, *, until: Any) -> None:
    """Equal prompts, so that the cache is hit; one request that is too long."""
    body = {"model": "smollm2", "prompt": "Once upon a time " * 20, "max_tokens": 8, "n": 4}
    deadline = time.monotonic() + READY_WITHIN_S
    with httpx.Client(base_url=url, timeout=30) as http:
        assert http.post("/v1/completions", json={**body, "max_tokens": 10**6}).status_code == 400
        while not until():
            assert time.monotonic() < deadline, "prometheus has not scraped the server"
            assert http.post("/v1/completions", json=body).status_code == 200


def _n_scrapes(client: httpx.Client) -> float:
    try:
        return _value(client, 'count_over_time(up{job="quire"}[1h])')
    except httpx.HTTPError:
        return 0.0


def _ask(client: httpx.Client, expr: str) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/query", params={"query": expr}).json()
    assert answer["status"] == "success", f"{expr}: {answer}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def _value(client: httpx.Client, expr: str) -> float:
    result = _ask(client, expr)
    return float(result[0]["value"][1]) if result else 0.0


def _exprs() -> list[tuple[str, str]]:
    """(name, query) of every query of every panel."""
    return [
        (f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])
        for path in sorted(FOLDER.glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize(("name", "expr"), _exprs(), ids=[name for name, _ in _exprs()])
def test_every_panel_shows_something(prometheus: httpx.Client, name: str, expr: str) -> None:
    filled = expr.replace("$__rate_interval", "30s").replace("$instance", ".*")
    result = _ask(prometheus, filled)
    assert result, f"{name}: {filled}"
    assert all(re.fullmatch(r"-?[0-9.e+-]+", sample["value"][1]) for sample in result), result


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("rule", _rules("recording.rules.yml"), ids=lambda rule: rule["record"])
def test_every_recording_rule_gives_a_number(prometheus: httpx.Client, rule: dict[str, Any]) -> None:
    result = _ask(prometheus, rule["record"])
    assert result
    assert all(sample["value"][1] != "NaN" for sample in result)


@pytest.mark.slow
@needs_prometheus
def test_no_alert_fires_on_a_server_that_is_well(prometheus: httpx.Client) -> None:
    assert _ask(prometheus, 'ALERTS{alertstate="firing"}') == []


@pytest.mark.slow
@needs_prometheus
def test_alerts_read_metrics_that_exist(prometheus: httpx.Client) -> None:
    known = set(prometheus.get("/api/v1/label/__name__/values").json()["data"])
    families = set(prometheus.get("/api/v1/metadata").json()["data"])
    for rule in _rules("alerts.rules.yml"):
        for name in re.findall(r"\bquire[a-z_:0-9]+", rule["expr"]):
            # A counter by reason has no series before its first reason, but is declared.
            assert name in known or name in families or name.removesuffix("_total") in families, name
