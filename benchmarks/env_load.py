"""Many parallel environments: the environment service compared with the EnvService of AgentEvolver and AgentJet."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.env_peer import COMMAND, ENV_SERVICE
from benchmarks.env_services import (
    APPWORLD,
    COUNTER,
    OURS,
    THEIRS,
    Life,
    Machine,
    Phase,
    Script,
    available,
    live,
    side_by_side,
)
from benchmarks.report import Report

MANY, FEW = 64, 8
THEIRS_AT_MOST = 16
"""Maximum of parallel AppWorld worlds of the reference: one takes seconds of both cores, so 64 take minutes."""
BURSTS = 15
_SMALLER = (48, 32, 24, 16)
"""Smaller numbers of worlds to try if the machine cannot hold `MANY` worlds of the reference."""
_SPARE = 3 << 30
"""Bytes of memory left to the rest of the machine."""
Lives = Mapping[str, Sequence[Life]]

_LOGIN = """\
```python
profile = apis.supervisor.show_profile()
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = apis.simple_note.login(username=profile["email"], password=passwords["simple_note"])["access_token"]
```"""
_LIGHT = "```python\nprint(6 * 7)\n```"
_CALL = """\
```python
print(apis.simple_note.search_notes(access_token=token, page_index=0, page_limit=5))
```"""
_SOLVE = """\
```python
notes = []
for page in range(5):
    notes += apis.simple_note.search_notes(access_token=token, page_index=page, page_limit=5)
apis.supervisor.complete_task(answer=len(notes))
```"""


def run(*, quick: bool) -> Report:
    many, few, rounds = (8, 2, 1) if quick else (MANY, FEW, 1)
    how_often = "once" if rounds == 1 else f"{rounds} times with {few} worlds (medians) and once with {many}"
    report = Report(
        "Many worlds at once",
        "The environment service compared with the reference, the EnvService of agentscope-runtime, which "
        "AgentEvolver uses too: a FastAPI server with one Ray actor per instance. The same client drives both over "
        "the same HTTP routes, with the same actions, on the same AppWorld data (synthetic people, generated for "
        "this run); every observation and score is checked. Each repetition starts the service, creates all worlds "
        "concurrently, uses them, releases them, and stops the service. With AppWorld one service runs at a time, "
        f"{how_often}. **Compare CPU per operation**: throughput depends on other load on the machine, most of all "
        "for a service with a single process.",
    )
    with tempfile.TemporaryDirectory(prefix="el-") as folder:
        machine = Machine.make(Path(folder) / "root")
        sides = (OURS, THEIRS) if ENV_SERVICE.python else (OURS,)
        if machine.python is None:
            report.text(f"**AppWorld was not measured**: no interpreter has it; create one with `{COMMAND}`.")
        else:
            _appworld(report, machine, sides, many, few, rounds)
        script = _counter(5 if quick else 10)
        found = side_by_side(machine, sides, script, many, 2 if quick else BURSTS)
    _write_counter(report, found, many, script)
    report.text(_HOW)
    if THEIRS in sides:
        report.text(_versions())
    else:
        report.text(
            f"**The reference was not measured**: {ENV_SERVICE.folder.name} does not exist; create it with `{COMMAND}`."
        )
    return report


def _appworld(report: Report, machine: Machine, sides: Sequence[str], many: int, few: int, rounds: int) -> None:
    script = Script(
        APPWORLD,
        prepare=(_LOGIN,),
        steps={"light": (_LIGHT, "42", 10), "call": (_CALL, '"note_id"', 10)},
        finish=_SOLVE,
        evaluations=2,
        params={"max_interactions": 1000},
        of_task="a0count",
    )
    small = _in_turns(machine, sides, script, few, rounds)
    large: dict[str, list[Life]] = {}
    for name in sides:
        each = max(life.used_world for life in small[name])
        wanted = many if name == OURS else min(many, THEIRS_AT_MOST)
        instances = _most(wanted, each, available() - max(life.idle for life in small[name]))
        large[name] = [live(machine, name, script, instances)]
        if wanted < many:
            report.text(f"**{name} was measured with at most {instances} worlds**: creating {many} takes minutes.")
        elif instances < many:
            report.text(
                f"**{name} was measured with {instances} worlds instead of {many}**: {_mb(each)} MB each do not fit "
                "into this machine's memory."
            )
    report.heading("AppWorld")
    if THEIRS in sides:
        report.text(" ".join(_in_words(group[OURS], group[THEIRS]) for group in (large, small)))
    report.table(("CPU ms of one operation", *_header(small, large)[1:]), _work(small, large))
    report.table((*_header(small, large), "load"), _speed(small, large))
    report.table(("", *_header(small, large)[1:]), _memory(small, large))
    report.table(("", *sides), _service({name: [*small[name], *large[name]] for name in sides}))


def _in_turns(machine: Machine, sides: Sequence[str], script: Script, instances: int, rounds: int) -> Lives:
    found: dict[str, list[Life]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides[:: 1 if number % 2 else -1]:
            found[name].append(live(machine, name, script, instances))
    return found


def _in_words(ours: Sequence[Life], theirs: Sequence[Life]) -> str:
    def ratio(cell: Callable[[Life], float]) -> str:
        return _number(statistics.median(map(cell, ours)) / statistics.median(map(cell, theirs)))

    sizes = " against ".join(dict.fromkeys(str(lives[0].instances) for lives in (ours, theirs)))
    return (
        f"{sizes} at once, {OURS} over {THEIRS}: CPU of making a world {ratio(_cpu_ms('create'))}, of a step with an "
        f"API call {ratio(_cpu_ms('call'))}, of an evaluation {ratio(_cpu_ms('evaluate'))}, memory per world "
        f"{ratio(lambda life: life.used_world)}; worlds made per second {ratio(_rate('create'))}, steps with an API "
        f"call per second {ratio(_rate('call'))}, complete episodes per second {ratio(_episodes_per_second)}."
    )


def _counter(times: int) -> Script:
    return Script(COUNTER, prepare=(), steps={"step": ("up", "", times)}, finish="", evaluations=1)


def _most(wanted: int, each: float, free: float) -> int:
    """Return the largest number of worlds, up to ``wanted``, that fits into memory."""
    return next(n for n in (wanted, *(n for n in _SMALLER if n < wanted), 1) if n * each < free - _SPARE or n == 1)


# --- tables -------------------------------------------------------------------------------------------------------


def _header(*groups: Lives) -> tuple[str, ...]:
    return ("at once", *(f"{name}, {lives[0].instances}" for group in groups for name, lives in group.items()))


def _row(
    what: str,
    groups: Sequence[Lives],
    cell: Callable[[Life], float],
    form: Callable[[float], str],
    of: Callable[[list[float]], float] = statistics.median,
) -> list[str]:
    """Return a table row with the median of each group's measurements, or another aggregate ``of`` them."""
    return [what, *(form(of([cell(life) for life in lives])) for group in groups for lives in group.values())]


_OPERATIONS = {
    "create": "worlds made",
    "light": "steps that print a number",
    "call": "steps with an API call",
    "finish": "last steps (they complete the task)",
    "first evaluate": "first evaluations",
    "evaluate": "further evaluations",
    "release": "worlds released",
}


def _speed(*groups: Lives) -> list[list[str]]:
    rows = []
    for phase, what in _OPERATIONS.items():
        row = _row(f"{what}/s", groups, _rate(phase), _number)
        rows.append([*row, _loads(phase, groups)])
    rows.append([*_row("complete episodes/s", groups, _episodes_per_second, _number), ""])
    return rows


def _loads(phase: str, groups: Sequence[Lives]) -> str:
    """Return the lowest and highest load average after this phase."""
    found = [life.phases[phase].load for group in groups for lives in group.values() for life in lives]
    return f"{min(found):.1f} to {max(found):.1f}"


def _episodes_per_second(life: Life) -> float:
    once = (phase.wall for name, phase in life.phases.items() if name != "evaluate")
    return life.instances / sum(once)


def _work(*groups: Lives) -> list[list[str]]:
    rows = []
    for phase, what in _OPERATIONS.items():
        if phase != "release":  # the account of a process that Ray kills ends with it
            rows.append(_row(what, groups, _cpu_ms(phase), _number))
    return rows


def _memory(*groups: Lives) -> list[list[str]]:
    return [
        _row("MB per world, new", groups, lambda life: life.world, _mb),
        _row("MB per world, used", groups, lambda life: life.used_world, _mb),
        _row("MB of the service without worlds", groups, lambda life: life.idle, _mb),
        _row("MB of service and worlds", groups, lambda life: life.idle + life.instances * life.used_world, _mb),
        _row("left after release: MB", groups, lambda life: life.left, _mb),
        _row("left after release: processes", groups, lambda life: life.left_processes, _whole),
        _row(
            "left after release: kB of files per world",
            groups,
            lambda life: life.left_files / life.instances / 1e3,
            _whole,
        ),
    ]


def _service(lives: Lives) -> list[list[str]]:
    groups = (lives,)
    return [
        _row("seconds from its start until it answers", groups, lambda life: life.start, _number),
        _row("seconds until the first world is there, after that", groups, lambda life: life.first, _number),
        *(
            _row(f"ms of one {what}, one world alone (median)", groups, _alone_ms(p), _number)
            for p, what in (("light", "step that prints a number"), ("call", "step with an API call"))
        ),
        _row("processes without worlds", groups, lambda life: life.idle_processes, _whole),
        _row("CPU without worlds, % of a core", groups, lambda life: life.idle_cpu * 100, _number),
        _row("seconds from SIGTERM until its last process has ended", groups, lambda life: life.stop, _number),
        _row("processes that had to be killed after that", groups, lambda life: len(life.left_running), _whole),
    ]


def _write_counter(report: Report, lives: Lives, many: int, script: Script) -> None:
    report.heading("A world that costs nothing")
    (_, _, times) = script.steps["step"]
    report.text(
        f"An environment that only counts, {many} at once: the cost is the service's own work, with HTTP and the "
        f"communication with the world's process. All services are running and take turns in bursts of {times} steps "
        f"of each world; medians of {len(lives[OURS])} bursts."
    )
    groups = (lives,)
    rows = [
        _row("CPU ms of a step, service and world", groups, _cpu_ms("step"), _number),
        _row("CPU ms of making a world", groups, _cpu_ms("create"), _number),
        _row("steps/s", groups, _rate("step"), _number),
        _row("worlds made/s (once)", groups, _rate("create"), _number),
        _row("load while they took turns, at most", groups, lambda life: life.phases["step"].load, _number, max),
        _row("ms of a step, one world alone (median)", groups, _alone_ms("step"), _number),
        _row("MB per world", groups, lambda life: life.used_world, _mb),
        _row("MB of the service without worlds", groups, lambda life: life.idle, _mb),
    ]
    report.table(_header(lives), rows)


def _rate(phase: str) -> Callable[[Life], float]:
    return lambda life: life.phases[phase].per_second


def _cpu_ms(phase: str) -> Callable[[Life], float]:
    return lambda life: life.phases[phase].cpu_each * 1e3


def _alone_ms(phase: str) -> Callable[[Life], float]:
    return lambda life: _p50(life.alone[phase])


def _p50(phase: Phase) -> float:
    return statistics.median(phase.latencies) * 1e3


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _whole(value: float) -> str:
    return str(round(value))


def _mb(value: float) -> str:
    return str(round(value / 1e6))


def _versions() -> str:
    names = ("agentscope-runtime", "ray", "appworld", "fastapi", "pydantic")
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    command = [str(ENV_SERVICE.python), "-c", code, *names]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return f"The reference: {', '.join(f'{name} {version}' for name, version in zip(names, found, strict=True))}."


_HOW = """\
How to read this:

- **The services do different work.** In the reference, AppWorld, the answers and the code that a model wrote share one
  process per world. ASTuner uses three: the apps, a shell for the code (confined by the kernel), and a referee between
  them. Every evaluation is a fresh process, the only one that can read the answers. The memory of a world and the CPU
  of an evaluation pay for this isolation. An episode is usually evaluated once.
- **Last steps**: the reference evaluates in the step that completes the task, and again on request. ASTuner evaluates
  on request only. The first evaluation in a process of the reference imports its modules.
- **Complete episodes/s** is the number of worlds divided by the time of all rows above it, with one evaluation each.
- **CPU** covers the service and all its worlds, without the clients. A world that is created alone costs less than a
  world that is created concurrently with others on two cores.
- **Memory** is PSS: private memory, plus a proportional share of shared memory. The memory of a world is the memory of
  all processes with all worlds, minus the memory without worlds, divided by the number of worlds. *Without worlds* is
  measured after the first world was released. By then ASTuner's service has the process that it forks worlds from,
  with AppWorld imported; the reference has Ray's processes and Ray's idle workers, one of which a world then takes.
- **Left** is measured four seconds after the last release. The reference keeps each world's outputs on disk.
- Both services run with their defaults. Ray comes from `pip install ray`, limited to 127.0.0.1 and without usage
  statistics. The authors of the reference ship it in a container image; here it runs without one."""
