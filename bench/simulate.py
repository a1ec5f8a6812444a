"""What the batching parameters do to every column of the cases, without a device: the real scheduler before a
device that exists as a formula (bench/simulation/). Seconds instead of GPU time; a measured run decides.

    python -m bench.simulate
    python -m bench.simulate --cases c256,shared --mixed-step-tokens 512 --mixed-step-tokens 800
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import typer

from bench.measures import summarize
from bench.report import runs_table
from bench.scenarios import choose_cases
from bench.simulation.device import H200_LLAMA_8B, SERVED
from bench.simulation.replay import Replay, WorkerShape
from router.config import RouterConfig
from settings.errors import ConfigError

app = typer.Typer(add_completion=False)


def configs(choices: dict[str, list[float] | list[int]]) -> list[RouterConfig]:
    """Every combination of the values given; a parameter without values keeps its default."""
    named = [[(name, value) for value in values] for name, values in choices.items() if values]
    return [RouterConfig(**dict(combination)) for combination in itertools.product(*named)]  # type: ignore[arg-type]  # checked by RouterConfig


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Cases or groups of bench.serve, comma-separated")] = "gpu",
    max_batch_prefill_tokens: Annotated[int, typer.Option(help="Of the worker", min=1)] = 8192,
    mixed_step_tokens: Annotated[list[int] | None, typer.Option(help="Repeat it to compare")] = None,
    decode_pause_ratio: Annotated[list[float] | None, typer.Option(help="Repeat it to compare")] = None,
    max_waiting_tokens: Annotated[list[int] | None, typer.Option(help="Repeat it to compare")] = None,
    chunk_token_us: Annotated[
        float, typer.Option(help="Time of one prompt token on the device")
    ] = H200_LLAMA_8B.chunk_token_ms * 1e3,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals")] = 7,
) -> None:
    """Replay the cases on the scheduler's own code and print what clients would have measured."""
    choices: dict[str, list[float] | list[int]] = {
        "mixed_step_tokens": mixed_step_tokens or [],
        "decode_pause_ratio": decode_pause_ratio or [],
        "max_waiting_tokens": max_waiting_tokens or [],
    }
    device = dataclasses.replace(H200_LLAMA_8B, chunk_token_ms=chunk_token_us / 1e3)
    worker = WorkerShape(max_batch_prefill_tokens=max_batch_prefill_tokens)
    try:
        chosen = choose_cases(cases)
        compared = configs(choices)
    except (ConfigError, ValueError) as error:
        typer.echo(f"bench.simulate: {error}", err=True)
        raise typer.Exit(2) from None
    for config in compared:
        rows = []
        for case in chosen:
            replay = Replay(case=case, config=config, worker=worker, device=device, paths=SERVED, seed=seed)
            rows.append((case.name, summarize(replay.run()).as_dict()))
        names = (name for name in choices if choices[name])
        title = " ".join(f"--{name.replace('_', '-')}={getattr(config, name):g}" for name in names)
        typer.echo(f"\n{title or 'defaults'}\n\n{runs_table(rows)}")


if __name__ == "__main__":
    app()
