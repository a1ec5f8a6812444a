"""Writes deploy/grafana/dashboards/*.json: `python -m deploy.dashboards`. A test checks that they are
current."""

from __future__ import annotations

from deploy.dashboards.files import FOLDER, files

if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / name}")
