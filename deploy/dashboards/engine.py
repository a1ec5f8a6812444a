"""What do the workers do with their time and memory, and what does the scheduler cost?"""

from __future__ import annotations

from deploy.dashboards.panel import Dashboard, Query, Row, gauge, plot, quantiles, rate

_STEPS = rate("quire_scheduler_steps_total")

ENGINE = Dashboard(
    uid="quire-engine",
    title="Quire: engine",
    text="Steps, batches, KV blocks and replicas, for tuning.",
    rows=(
        Row(
            title="Steps",
            panels=(
                plot(
                    "Steps",
                    "Forward passes per second, over all workers.",
                    Query(rate("quire_steps_total"), "steps"),
                ),
                plot(
                    "Time of a step",
                    "On the worker, from launch to result.",
                    *quantiles("quire_worker_step_seconds", (0.5, 0.95, 0.99)),
                    unit="s",
                ),
                plot(
                    "Rows of a step",
                    "Requests that got a token in a step: the batch. Larger is cheaper per token.",
                    *quantiles("quire_step_rows", (0.5, 0.95)),
                    Query(
                        f"{rate('quire_step_rows_sum')} / clamp_min({rate('quire_step_rows_count')}, 1e-9)",
                        "mean",
                    ),
                ),
                plot(
                    "Idle between decode steps",
                    "Share of the time that the device waited for its next decode step. More than a few "
                    "percent: raise --window, or the router is at its limit.",
                    Query(
                        f"{rate('quire_worker_steady_idle_seconds_total', by='replica')} / clamp_min("
                        f"{rate('quire_worker_steady_seconds_total', by='replica')}, 1e-9)",
                        "{{replica}}",
                    ),
                    unit="percentunit",
                ),
                plot(
                    "Steps in flight",
                    "Sent and not answered, per worker; at most --window.",
                    Query(gauge("quire_steps_in_flight", by="replica"), "{{replica}}"),
                ),
                plot(
                    "Tokens wasted",
                    "Sampled in a step that was under way when the answer ended.",
                    Query(rate("quire_wasted_tokens_total"), "wasted"),
                ),
            ),
        ),
        Row(
            title="KV cache",
            panels=(
                plot(
                    "Blocks",
                    "Over all workers. Cached blocks are free at need.",
                    Query(gauge("quire_kv_blocks_used"), "used"),
                    Query(gauge("quire_kv_blocks_cached"), "cached"),
                    Query(gauge("quire_kv_blocks_free"), "free"),
                    stacked=True,
                ),
                plot(
                    "In use, per worker",
                    "Share of the blocks that running requests hold.",
                    Query(
                        f"{gauge('quire_kv_blocks_used', by='replica')} / "
                        f"{gauge('quire_kv_blocks', by='replica')}",
                        "{{replica}}",
                    ),
                    unit="percentunit",
                ),
                plot(
                    "Evicted",
                    "Cached blocks given up per second, per worker.",
                    Query(rate("quire_kv_blocks_evicted_total", by="replica"), "{{replica}}"),
                ),
                plot(
                    "Preemptions",
                    "Requests put back for lack of blocks; they are computed again. Often: lower "
                    "--max-batch-size or add workers.",
                    Query(rate("quire_preemptions_total"), "preempted"),
                ),
                plot(
                    "Prompt lengths",
                    "Of finished requests.",
                    *quantiles("quire_request_prompt_tokens", (0.5, 0.95)),
                ),
                plot(
                    "Answer lengths",
                    "Of finished requests.",
                    *quantiles("quire_request_output_tokens", (0.5, 0.95)),
                ),
            ),
        ),
        Row(
            title="Workers and scheduler",
            panels=(
                plot(
                    "Running, per worker",
                    "Requests in the batch.",
                    Query(gauge("quire_requests_running", by="replica"), "{{replica}}"),
                    stacked=True,
                ),
                plot(
                    "Workers",
                    "Connected, and in the address list.",
                    Query(gauge("quire_replicas_live"), "live"),
                    Query(gauge("quire_replicas_known"), "known"),
                ),
                plot(
                    "Lost and moved",
                    "Workers lost, and requests that went on elsewhere, per second.",
                    Query(rate("quire_replicas_lost_total"), "workers lost"),
                    Query(rate("quire_migrations_total"), "requests moved"),
                ),
                plot(
                    "Scheduler: CPU per step",
                    "From a worker's result to its events; gRPC is not counted.",
                    Query(
                        f"{rate('quire_scheduler_step_cpu_seconds_total')} / clamp_min({_STEPS}, 1e-9)",
                        "mean",
                    ),
                    unit="s",
                ),
                plot(
                    "Scheduler: share of a core",
                    "It is one process: near 1 the router is full, see docs/scaling.md.",
                    Query(rate("quire_scheduler_step_cpu_seconds_total", by="instance"), "{{instance}}"),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
