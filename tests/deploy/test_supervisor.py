from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from deploy.backoff import Backoff
from deploy.errors import StartFailedError
from deploy.supervisor import Keeper, State, Supervisor
from tests.deploy.conftest import FOREVER, READY, MakeSpec


class Heard:
    """What the processes said, and a way to wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def say(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._tasks.append(asyncio.create_task(self._notify()))

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, words: str, *, times: int = 1) -> None:
        async with self._news:
            await self._news.wait_for(lambda: sum(words in line for _, line in self.lines) >= times)


@pytest.fixture
def heard() -> Heard:
    return Heard()


async def test_all_are_ready_then_end_stage_by_stage(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    ending = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('ending'), sys.exit(0)))\n"
    specs = [
        make_spec(ending + READY + FOREVER, name="worker", stage=2),
        make_spec(ending + READY + FOREVER, name="api", stage=0),
        make_spec(ending + READY + FOREVER, name="scheduler", stage=1),
    ]
    supervisor = Supervisor(specs, env=env, say=heard.say)
    await supervisor.start()
    assert {keeper.state for keeper in supervisor.keepers} == {State.READY}
    await supervisor.stop()
    assert [name for name, line in heard.lines if line == "ending"] == ["api", "scheduler", "worker"]
    assert {keeper.state for keeper in supervisor.keepers} == {State.ENDED}


async def test_a_process_that_dies_is_started_again(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    keeper = Keeper(
        make_spec("print('alive')\n" + READY + FOREVER),
        env=env,
        say=heard.say,
        backoff=Backoff(first_s=0.01),
    )
    keeper.restarts = True
    task = asyncio.create_task(keeper.run())
    await keeper.was_ready.wait()
    assert keeper.child is not None
    os.kill(keeper.child.pid, signal.SIGKILL)
    await heard.until("was killed by SIGKILL")
    await heard.until("alive", times=2)
    await keeper.stop()
    await task
    assert not keeper.child.running


async def test_a_process_that_ends_before_it_is_ready_fails_the_start_with_its_words(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    good = make_spec(READY + FOREVER, name="scheduler")
    bad = make_spec(
        "import sys\nprint('error: no such model: x', file=sys.stderr)\nsys.exit(2)", name="worker 0"
    )
    supervisor = Supervisor([good, bad], env=env, say=heard.say)
    with pytest.raises(StartFailedError, match="worker 0 ended with code 2: no such model: x") as raised:
        await supervisor.start()
    assert raised.value.exit_code == 2, "a setting that can't be used, whoever found it"
    await supervisor.stop()
    assert all(keeper.child is None or not keeper.child.running for keeper in supervisor.keepers)


async def test_a_death_between_ready_and_settled_fails_the_start(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    supervisor = Supervisor(
        [make_spec(READY + "import sys; sys.exit(1)", name="api")], env=env, say=heard.say
    )

    async def start_and_watch() -> None:
        await supervisor.start()
        await supervisor.watch()

    with pytest.raises(StartFailedError, match="api ended with code 1"):
        await start_and_watch()
    await supervisor.stop()


async def test_a_process_that_never_becomes_ready_fails_the_start_after_the_limit(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    spec = make_spec("print('loading weights', flush=True)\n" + FOREVER, ready_limit_s=0.5)
    supervisor = Supervisor([spec], env=env, say=heard.say)
    with pytest.raises(StartFailedError, match=r"not ready within 0.5 s \(--start-timeout-s\)"):
        await supervisor.start()
    await supervisor.stop()
    child = supervisor.keepers[0].child
    assert child is not None
    assert not child.running


async def test_a_program_that_is_not_there(env: dict[str, str], heard: Heard, make_spec: MakeSpec) -> None:
    spec = make_spec("")
    missing = type(spec)(name="api", argv=("/no/such/program",), stage=0, ready_limit_s=1, grace_s=1)
    supervisor = Supervisor([missing], env=env, say=heard.say)
    with pytest.raises(StartFailedError, match=r"can't start api \(/no/such/program\)"):
        await supervisor.start()
    await supervisor.stop()


async def test_one_that_ignores_the_polite_signal_is_killed(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    supervisor = Supervisor([make_spec(deaf + READY + FOREVER, grace_s=0.05)], env=env, say=heard.say)
    await supervisor.start()
    await supervisor.stop()
    assert ("worker 0", "did not end within 0.05 s: killed") in heard.lines


async def test_what_a_process_leaves_behind_is_swept(
    make_spec: MakeSpec, env: dict[str, str], heard: Heard
) -> None:
    script = (
        "import subprocess, sys\n"
        "sleeper = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])\n"
        "print('grandchild', sleeper.pid)\n"
    )
    supervisor = Supervisor([make_spec(script + READY + FOREVER)], env=env, say=heard.say)
    await supervisor.start()
    await heard.until("grandchild")
    pid = int(next(line for _, line in heard.lines if "grandchild" in line).split()[1])
    await supervisor.stop()
    await _until_gone(pid)


async def test_children_die_with_a_supervisor_that_is_killed(
    env: dict[str, str], tmp_path: Path, make_spec: MakeSpec
) -> None:
    """kill -9 leaves the supervisor no word: the kernel ends its children."""
    root = Path(__file__).parents[2]
    child = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from deploy.process import die_with_supervisor, report_ready\n"
        "die_with_supervisor(); report_ready()\n" + FOREVER
    )
    program = tmp_path / "supervisor.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "import asyncio, os\n"
        "from deploy.child import ChildSpec\n"
        "from deploy.supervisor import Supervisor\n"
        "async def main():\n"
        f"    spec = ChildSpec(name='w', argv=(sys.executable, '-c', {child!r}), stage=0,\n"
        "                     ready_limit_s=20, grace_s=1)\n"
        "    supervisor = Supervisor([spec], env=os.environ, say=lambda *_: None)\n"
        "    await supervisor.start()\n"
        "    print(supervisor.keepers[0].child.pid, flush=True)\n"
        "    await supervisor.watch()\n"
        "asyncio.run(main())\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), env=env, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await _until_gone(pid)


async def test_backoff_doubles_to_a_limit_and_forgives_a_long_life() -> None:
    backoff = Backoff(first_s=1, most_s=5, settled_s=60)
    assert [backoff.after_death(lived_s=0) for _ in range(4)] == [1, 2, 4, 5]
    assert backoff.after_death(lived_s=61) == 1
    assert backoff.after_death(lived_s=0) == 2


async def _until_gone(pid: int) -> None:
    """Waits on the kernel's own notice of the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(10):
            await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
