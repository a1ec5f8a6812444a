"""`python -m bench`: the benchmarks that need no GPU and no other engine, one after the other."""

from __future__ import annotations

import subprocess
import sys

SUITE = ("allocator", "scheduler_step", "api_stream", "cpu_step")
"""Each is a module of its own; run it alone with `python -m bench.NAME --help`."""


def main(names: list[str]) -> int:
    """Runs the named ones, or all; the exit code counts those that failed."""
    unknown = [name for name in names if name not in SUITE]
    if unknown:
        print(f"bench: unknown {', '.join(unknown)}; choose among {', '.join(SUITE)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or SUITE:
        print(f"\n=== bench.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nbench: failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
