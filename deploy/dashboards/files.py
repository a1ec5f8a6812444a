"""The dashboards as the files that Grafana reads."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.dashboards.engine import ENGINE
from deploy.dashboards.overview import OVERVIEW
from deploy.dashboards.panel import as_json

FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def files() -> dict[str, str]:
    """File name to text."""
    both = {"overview.json": OVERVIEW, "engine.json": ENGINE}
    return {
        name: json.dumps(as_json(dashboard), indent=1, ensure_ascii=False) + "\n"
        for name, dashboard in both.items()
    }
