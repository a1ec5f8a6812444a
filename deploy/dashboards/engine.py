"""What do the workers do with their time and memory, and what does the scheduler cost?"""

from __future__ import annotations

from deploy.dashboards.panel import Dashboard, Panel, Query, Row, gauge, quantiles, rate

_STEPS = rate("quire_scheduler_steps_total")

ENGINE = Dashboard(
    uid="quire-engine",
    title="Quire: engine",
    text="Steps, batches, KV blocks and replicas, for tuning.",
    rows=(
        Row(
            title="Steps",
            panels=(
                Panel(
                    title="Steps",
                    text="Forward passes per second, over all workers.",
                    unit="short",
                    queries=(Query(rate("quire_steps_total"), "steps"),),
                ),
                Panel(
                    title="Time of a step",
                    text="On the worker, from launch to result.",
                    unit="s",
                    queries=quantiles("quire_worker_step_seconds", (0.5, 0.95, 0.99)),
                ),
                Panel(
                    title="Rows of a step",
                    text="Requests that got a token in a step: the batch. Larger is cheaper per token.",
                    unit="short",
                    queries=(
                        *quantiles("quire_step_rows", (0.5, 0.95)),
                        Query(
                            f"{rate('quire_step_rows_sum')} / clamp_min({rate('quire_step_rows_count')}, "
                            "1e-9)",
                            "mean",
                        ),
                    ),
                ),
                Panel(
                    title="Idle between decode steps",
                    text="Share of the time that the device waited for its next decode step. More than a few "
                    "percent: raise --window, or the router is at its limit.",
                    unit="percentunit",
                    queries=(
                        Query(
                            f"{rate('quire_worker_steady_idle_seconds_total', by='replica')} / clamp_min("
                            f"{rate('quire_worker_steady_seconds_total', by='replica')}, 1e-9)",
                            "{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    title="Steps in flight",
                    text="Sent and not answered, per worker; at most --window.",
                    unit="short",
                    queries=(Query(gauge("quire_steps_in_flight", by="replica"), "{{replica}}"),),
                ),
                Panel(
                    title="Tokens wasted",
                    text="Sampled in a step that was under way when the answer ended.",
                    unit="short",
                    queries=(Query(rate("quire_wasted_tokens_total"), "wasted"),),
                ),
            ),
        ),
        Row(
            title="KV cache",
            panels=(
                Panel(
                    title="Blocks",
                    text="Over all workers. Cached blocks are free at need.",
                    unit="short",
                    stacked=True,
                    queries=(
                        Query(gauge("quire_kv_blocks_used"), "used"),
                        Query(gauge("quire_kv_blocks_cached"), "cached"),
                        Query(gauge("quire_kv_blocks_free"), "free"),
                    ),
                ),
                Panel(
                    title="In use, per worker",
                    text="Share of the blocks that running requests hold.",
                    unit="percentunit",
                    queries=(
                        Query(
                            f"{gauge('quire_kv_blocks_used', by='replica')} / "
                            f"{gauge('quire_kv_blocks', by='replica')}",
                            "{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    title="Evicted",
                    text="Cached blocks given up per second, per worker.",
                    unit="short",
                    queries=(Query(rate("quire_kv_blocks_evicted_total", by="replica"), "{{replica}}"),),
                ),
                Panel(
                    title="Preemptions",
                    text="Requests put back for lack of blocks; they are computed again. Often: lower "
                    "--max-batch-size or add workers.",
                    unit="short",
                    queries=(Query(rate("quire_preemptions_total"), "preempted"),),
                ),
                Panel(
                    title="Prompt lengths",
                    text="Of finished requests.",
                    unit="short",
                    queries=quantiles("quire_request_prompt_tokens", (0.5, 0.95)),
                ),
                Panel(
                    title="Answer lengths",
                    text="Of finished requests.",
                    unit="short",
                    queries=quantiles("quire_request_output_tokens", (0.5, 0.95)),
                ),
            ),
        ),
        Row(
            title="Workers and scheduler",
            panels=(
                Panel(
                    title="Running, per worker",
                    text="Requests in the batch.",
                    unit="short",
                    stacked=True,
                    queries=(Query(gauge("quire_requests_running", by="replica"), "{{replica}}"),),
                ),
                Panel(
                    title="Workers",
                    text="Connected, and in the address list.",
                    unit="short",
                    queries=(
                        Query(gauge("quire_replicas_live"), "live"),
                        Query(gauge("quire_replicas_known"), "known"),
                    ),
                ),
                Panel(
                    title="Lost and moved",
                    text="Workers lost, and requests that went on elsewhere, per second.",
                    unit="short",
                    queries=(
                        Query(rate("quire_replicas_lost_total"), "workers lost"),
                        Query(rate("quire_migrations_total"), "requests moved"),
                    ),
                ),
                Panel(
                    title="Scheduler: CPU per step",
                    text="From a worker's result to its events; gRPC is not counted.",
                    unit="s",
                    queries=(
                        Query(
                            f"{rate('quire_scheduler_step_cpu_seconds_total')} / clamp_min({_STEPS}, 1e-9)",
                            "mean",
                        ),
                    ),
                ),
                Panel(
                    title="Scheduler: share of a core",
                    text="It is one process: near 1 the router is full, see docs/scaling.md.",
                    unit="percentunit",
                    queries=(
                        Query(rate("quire_scheduler_step_cpu_seconds_total", by="instance"), "{{instance}}"),
                    ),
                ),
            ),
        ),
    ),
)
