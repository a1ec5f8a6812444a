"""The `quire` command from its first line: Ctrl-C while its modules are still being read ends it without a
traceback."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
