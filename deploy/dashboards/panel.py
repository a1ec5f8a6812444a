"""What a Grafana dashboard of ours is made of, as data; `as_json` gives Grafana's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`title` names what is shown, `text` says how to read it."""

    title: str
    text: str
    unit: str
    """Grafana's name: s, reqps, short, percentunit, bytes …"""
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    red_from: float | None = None
    """Stat panels turn red from here on."""
    red_below: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]


def stat(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    red_from: float | None = None,
    red_below: float | None = None,
) -> Panel:
    """One large number."""
    return Panel(
        title=title,
        text=text,
        unit=unit,
        queries=queries,
        kind="stat",
        width=4,
        height=4,
        red_from=red_from,
        red_below=red_below,
    )


def plot(title: str, text: str, *queries: Query, unit: str = "short", stacked: bool = False) -> Panel:
    """Lines over time; `stacked`: areas that add up."""
    return Panel(title=title, text=text, unit=unit, queries=queries, stacked=stacked)


def quantiles(metric: str, which: Sequence[float], *, by: str = "") -> tuple[Query, ...]:
    """Of a histogram, over the time that the dashboard's rates look back."""
    labels = f"le, {by}" if by else "le"
    return tuple(
        Query(
            f"histogram_quantile({q:g}, sum by ({labels}) "
            f'(rate({metric}_bucket{{instance=~"$instance"}}[$__rate_interval])))',
            f"p{q * 100:g}",
        )
        for q in which
    )


def rate(metric: str, *, by: str = "", labels: str = "") -> str:
    """Per second, summed."""
    chosen = ", ".join(filter(None, ('instance=~"$instance"', labels)))
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{{{chosen}}}[$__rate_interval]))"


def gauge(metric: str, *, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f'{grouped}({metric}{{instance=~"$instance"}})'


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Panels flow from left to right and wrap."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        panels.append(_row(row.title, number=len(panels) + 1, y=y))
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, number=len(panels) + 1, x=x, y=y))
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["quire"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["quire"], "title": "Quire", "keepTime": True}],
        "templating": {"list": _VARIABLES},
        "annotations": {"list": []},
        "panels": panels,
    }


_VARIABLES = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
    {
        "name": "instance",
        "label": "Router",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(quire_ready, instance)", "refId": "instance"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    },
]


def _row(title: str, *, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, *, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 10, "showPoints": "never"}
        if panel.stacked:
            custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": _steps(panel)},
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_from is not None:
        return [{"color": "green", "value": None}, {"color": "red", "value": panel.red_from}]
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return [{"color": "blue", "value": None}]
