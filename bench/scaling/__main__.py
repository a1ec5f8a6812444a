"""One command: what N replicas on one host serve beside one, and what happens when one of them is killed.

    python -m bench.scaling --tokenizer DIR -- quire serve --model DIR --port {port} …
    python -m bench.scaling --device fake --devices 2 --shrink 16

* One worker on one device: the case `c256`; then a worker on each device, with as many times the load.
* The case `shared` over several different prefixes, by exact, random and round-robin placement; then over
  many prefixes with a KV budget that holds only some of them.
* One of all workers killed (SIGKILL) under the load of c256, and started again by the server.

`--workers`, `--placement` and the like are added to the server's command.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.hardware import describe_host
from bench.load import PromptKind
from bench.report import write_report
from bench.scaling.fleet import FAKE_VOCAB, Device, FakeCost, fake_command
from bench.scaling.goals import Goal, gain_goals, loss_goals, placement_goals
from bench.scaling.loss import Phases
from bench.scaling.report import gain_table, loss_text, markdown, placement_table
from bench.scaling.run import PLACEMENTS, Found, Measurement, Plan, median_of
from bench.serve import RESULTS, prompt_source
from bench.server import ServerError, shown

PARTS = ("gain", "loss", "placement")


def main(
    command: Annotated[list[str] | None, typer.Argument(help="The server's command, after --")] = None,
    device: Annotated[Device, typer.Option(help="What the workers compute on")] = Device.GPU,
    devices: Annotated[int, typer.Option(help="How many; 0: all GPUs of the host", min=0)] = 0,
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, comma-separated")] = ",".join(PARTS),
    placements: Annotated[str, typer.Option(help="Which are compared")] = ",".join(PLACEMENTS),
    prefixes: Annotated[int, typer.Option(help="Different prefixes of the shared case", min=1)] = 8,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder")] = None,
    prompts: Annotated[PromptKind, typer.Option(help="What a prompt is sent as")] = PromptKind.TEXT,
    vocab_size: Annotated[int, typer.Option(help="Ids are drawn below it (token prompts)")] = FAKE_VOCAB,
    runs: Annotated[int, typer.Option(help="Of c256; the median counts", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of all prompts", min=1)] = 7,
    shrink: Annotated[int, typer.Option(help="Divides clients, requests and tokens (dry run)", min=1)] = 1,
    clients: Annotated[int, typer.Option(help="Client processes per device", min=1)] = 1,
    before_s: Annotated[float, typer.Option(help="Load before the kill")] = 10.0,
    after_s: Annotated[float, typer.Option(help="Load after the worker's return")] = 15.0,
    back_within_s: Annotated[float, typer.Option(help="The worker must be back")] = 120.0,
    ready_within_s: Annotated[float, typer.Option(help="A server must be ready")] = 300.0,
    step_ms: Annotated[float, typer.Option(help="A fake step")] = 8.0,
    row_us: Annotated[float, typer.Option(help="A row of a fake step")] = 30.0,
    token_us: Annotated[float, typer.Option(help="A prompt token of a fake step")] = 20.0,
    name: Annotated[str, typer.Option(help="Of the result files")] = "scaling",
    out: Annotated[Path, typer.Option(help="Folder for the results")] = RESULTS,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' output")] = None,
) -> None:
    """Measure N replicas beside one."""
    try:
        chosen = _chosen(parts, PARTS, "--parts")
        kinds = _chosen(placements, PLACEMENTS, "--placements")
        host = describe_host()
        n = devices or len(host["gpus"])
        if device is Device.FAKE:
            if command:
                raise ValueError("--device fake has a command of its own: give none")
            command = list(fake_command(FakeCost(step_ms, row_us, token_us)))
            prompts, n = PromptKind.TOKENS, devices or 2
        if not command:
            raise ValueError("give the server's command after --, or --device fake")
        if n < 1:
            raise ValueError("no GPU was found (nvidia-smi): give --devices, or --device fake")
        source = prompt_source(prompts, tokenizer, vocab_size)
    except ValueError as error:
        typer.echo(f"bench.scaling: {error}", err=True)
        raise typer.Exit(2) from None
    doc: dict[str, Any] = {
        "host": host, "server": shown(command), "n_devices": n, "seed": seed,
        "command": shown(["python", "-m", "bench.scaling", *sys.argv[1:]]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            base=tuple(command), n_devices=n, shrink=shrink, runs=runs, seed=seed, n_prefixes=prefixes,
            processes_per_device=clients, phases=Phases(before_s, after_s, back_within_s), placements=kinds,
            ready_within_s=ready_within_s, logs=logs or Path(folder),
        )  # fmt: skip
        plan.logs.mkdir(parents=True, exist_ok=True)
        measurement = Measurement(plan, source, say=typer.echo)
        try:
            if "gain" in chosen or "loss" in chosen:
                measurement.gain(loss="loss" in chosen)
            if "placement" in chosen:
                measurement.placements()
        except (ServerError, ValueError) as error:
            doc["stopped"] = str(error)
        except KeyboardInterrupt:
            doc["stopped"] = "interrupted"
        finally:
            measurement.close()
    found = measurement.found
    doc |= {"devices": found.devices, **found.as_dict()}
    goals = _goals(found, n)
    text = markdown(doc, sections=_sections(found, n), goals=goals)
    as_json, as_markdown = write_report(out, name, doc, text)
    typer.echo(f"\n{text}\n\n{as_json}\n{as_markdown}")
    if "stopped" in doc or any(run.n_failed for run in (*found.one, *found.all)):
        raise typer.Exit(1)


def _chosen(text: str, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Raises ValueError naming what there is."""
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name!r}: choose among {', '.join(known)}")
    return names


def _goals(found: Found, n: int) -> list[Goal]:
    goals: list[Goal] = []
    if found.one and found.all:
        goals += gain_goals(median_of(found.one), median_of(found.all), n=n)
    if found.one_prefixed and "exact" in found.few:
        goals += placement_goals(found.one_prefixed, found.few["exact"])
    if found.loss:
        goals += loss_goals(found.loss)
    return goals


def _sections(found: Found, n: int) -> list[tuple[str, str]]:
    sections = []
    if found.one and found.all:
        table = gain_table(median_of(found.one), median_of(found.all), n=n)
        caption = f"Median of {len(found.one)} run(s): {found.one[0].load}; {found.all[0].load}"
        sections.append(("c256", f"{caption}\n\n{table}"))
    if found.few:
        ones = [("one replica, its load", found.one_prefixed)] if found.one_prefixed else []
        first = next(iter(found.few.values()))
        text = f"{len(first.computed)} prefixes in seeded random order: {first.run.load}"
        sections.append(
            (
                "The shared case over several prefixes",
                f"{text}\n\n{placement_table([*ones, *found.few.items()])}",
            )
        )
    if found.many:
        first = next(iter(found.many.values()))
        text = (
            f"{len(first.computed)} prefixes, and a KV budget of {found.many_tokens:,} tokens per replica "
            f"(`--max-batch-total-tokens`), which holds only some of them beside the running requests: "
            f"{first.run.load}"
        )
        sections.append(
            (
                "More prefixes than a replica can hold",
                f"{text}\n\n{placement_table(list(found.many.items()))}",
            )
        )
    if found.loss:
        sections.append(("One worker killed with -9", loss_text(found.loss)))
    return sections


if __name__ == "__main__":
    typer.run(main)
