from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.dashboards.engine import ENGINE
from deploy.dashboards.files import FOLDER, files
from deploy.dashboards.overview import OVERVIEW
from deploy.dashboards.panel import WIDTH, Dashboard, as_json


@pytest.mark.parametrize("name", files())
def test_the_committed_files_are_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == files()[name], "run python -m deploy.dashboards"


def test_there_are_no_other_files() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(files())


@pytest.mark.parametrize("dashboard", [OVERVIEW, ENGINE], ids=lambda dashboard: dashboard.uid)
def test_panels_stand_side_by_side(dashboard: Dashboard) -> None:
    value = json.loads(json.dumps(as_json(dashboard)))
    panels: list[dict[str, Any]] = value["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= WIDTH
        taken |= cells
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
            assert all("$instance" in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("name", files())
def test_grafana_knows_every_field(name: str) -> None:
    """Grafana's own types of a dashboard keep what they know and drop the rest: nothing may be dropped."""
    ours = json.loads(files()[name])
    assert _dropped(ours, _as_grafana_has_it(ours)) == []
    ours["panels"][1]["colour"] = "red"
    assert _dropped(ours, _as_grafana_has_it(ours)) == [".panels[1].colour"]


def _as_grafana_has_it(dashboard: dict[str, Any]) -> Any:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(GrafanaDashboard.from_json(dashboard)))


def _dropped(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Places of what is set in one and neither set nor equal in the other."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            return [path]
        return [
            place
            for key, value in ours.items()
            if key in theirs or value not in ({}, [], None, "", False, 0)
            for place in (
                _dropped(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key}"]
            )
        ]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [path]
        return [
            place
            for i, (own, other) in enumerate(zip(ours, theirs, strict=True))
            for place in _dropped(own, other, f"{path}[{i}]")
        ]
    return [] if ours == theirs else [path]
