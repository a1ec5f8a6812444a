"""The version of the step protocol: a router and a worker must agree on it exactly."""

from __future__ import annotations

PROTOCOL_VERSION = 2
