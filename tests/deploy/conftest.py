"""Small real processes: supervision is about what the kernel does, so nothing here is faked."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable

import pytest

from deploy.child import ChildSpec

READY = "import os; os.write(int(os.environ['QUIRE_REPORT_FD']), b'ready\\n')\n"
FOREVER = "import signal\nsignal.pause()\n"

MakeSpec = Callable[..., ChildSpec]


@pytest.fixture
def make_spec() -> MakeSpec:
    def make(
        script: str, *, name: str = "worker 0", stage: int = 0, ready_limit_s: float = 20, grace_s: float = 5
    ) -> ChildSpec:
        argv = (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(script))
        return ChildSpec(name=name, argv=argv, stage=stage, ready_limit_s=ready_limit_s, grace_s=grace_s)

    return make


@pytest.fixture
def env() -> dict[str, str]:
    return dict(os.environ)
