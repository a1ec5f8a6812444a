"""Whether requests would be served, and why not."""

from __future__ import annotations

from router.core import SchedulerCore
from router.fleet import Fleet
from router.ipc.messages import ModelInfo, ServerState


def server_state(
    *, failed: bool, draining: bool, fleet: Fleet, core: SchedulerCore | None, model: ModelInfo | None
) -> ServerState:
    """What API processes are told whenever it changes."""
    n_live = fleet.n_live
    if failed:
        reason = "the scheduler has failed"
    elif draining:
        reason = "draining"
    elif n_live == 0:
        reason = fleet.why_none()
    elif core is not None and core.replicas and all(rs.closing for rs in core.replicas.values()):
        reason = "every worker drains: requests wait until one is back"
    else:
        reason = ""
    return ServerState(
        ready=not reason,
        reason=reason,
        draining=draining,
        model=model,
        n_replicas_live=n_live,
        n_replicas_known=len(fleet.links),
    )
