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
