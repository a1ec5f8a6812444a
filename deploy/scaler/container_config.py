"""From a running container to the order for another one like it: the engine's JSON in, the engine's JSON out.

A container's configuration holds what its image says mixed with what was asked for; only the latter is
carried over, so that a container of a newer image gets that image's own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER = "com.docker.compose.container-number"
IMAGE = "com.docker.compose.image"
_CARRIED = ("Cmd", "Entrypoint", "User", "WorkingDir", "Healthcheck", "ExposedPorts", "StopSignal")


def twin(
    container: Mapping[str, Any],
    *,
    old_image: Mapping[str, Any],
    new_image: Mapping[str, Any],
    number: int,
) -> dict[str, Any]:
    """What to POST to /containers/create. `container`, `old_image` (what it runs) and `new_image` (what its
    image's name means now) as the engine inspects them."""
    config = container["Config"]
    base = old_image.get("Config") or {}
    order: dict[str, Any] = {
        name: config[name]
        for name in _CARRIED
        if config.get(name) is not None and config[name] != base.get(name)
    }
    for name in ("StopTimeout", "Tty", "OpenStdin"):
        if config.get(name) is not None:
            order[name] = config[name]
    of_image = set(base.get("Env") or ())
    order["Env"] = [entry for entry in config.get("Env") or () if entry not in of_image]
    labels = {
        key: value
        for key, value in (config.get("Labels") or {}).items()
        if (base.get("Labels") or {}).get(key) != value
    }
    order["Labels"] = {**labels, NUMBER: str(number), IMAGE: new_image["Id"]}
    order["Image"] = config["Image"]
    order["HostConfig"] = dict(container["HostConfig"])
    order["NetworkingConfig"] = {"EndpointsConfig": _endpoints(container)}
    return order


def _endpoints(container: Mapping[str, Any]) -> dict[str, Any]:
    """The same networks and shared names; addresses and the own name are each container's own."""
    own = {container["Id"][:12], container["Name"].lstrip("/")}
    return {
        network: {"Aliases": [name for name in endpoint.get("Aliases") or () if name not in own]}
        for network, endpoint in container["NetworkSettings"]["Networks"].items()
    }


def address_of(container: Mapping[str, Any], *, default_port: int) -> str:
    """host:port in the first network that gave it an address; empty when none did."""
    for endpoint in container["NetworkSettings"]["Networks"].values():
        if endpoint.get("IPAddress"):
            return f"{endpoint['IPAddress']}:{_port(container, default_port)}"
    return ""


def uses_gpus(container: Mapping[str, Any]) -> bool:
    return bool(container["HostConfig"].get("DeviceRequests"))


def _port(container: Mapping[str, Any], default: int) -> int:
    for entry in container["Config"].get("Env") or ():
        name, _, value = entry.partition("=")
        if name == "QUIRE_PORT" and value.isdigit():
            return int(value)
    return default
