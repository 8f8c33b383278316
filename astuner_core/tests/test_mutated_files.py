"""No mutated experiment file and no mutated line of data gives a traceback: each is taken, or refused in words.

``python -m astuner_core.tests.test_mutated_files 10000`` makes as many of each, from another seed each time.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner.builtin.jsonl import JsonlConfig, JsonlTaskReader
from astuner.config import load_config
from astuner.config.capabilities import check_capabilities
from astuner.contracts.backbone import Capabilities
from astuner.contracts.errors import AstunerError, ConfigError
from astuner.contracts.types import Split

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "astuner_core/tests/data/seeds").rglob("*.yaml")])
LINES = [
    '{"query": "1+1", "answer": "2"}',
    '{"task_id": 5, "init_messages": [{"role": "user", "content": "hé"}], "metadata": {"a": [1, 2.5, null]}}',
    '{"question": "x", "env_type": "", "metadata": {"deep": {"er": {"est": true}}}, "id": "a"}',
]
_WORDS = r"""null ~ 1e400 -1e400 .inf .nan 12:30:45 9223372036854775808 -1 0 1e30 1e-400 0x1f 0o17 0b1 1_0 "\ud800" '
'' ' ' "\0" [] {} [[]] {a: null} {5: {}} {null: 1} {true: x} {[a]: b} ${astuner.seed} ${ ${a.b} ${oc.env:NOPE}
${oc.decode:'['} ??? &a *a <<: !!python/object:os.system !!set{a} !!binary!x !!timestamp'x' !!bool'x' !!int'' !!omap
! | > % @ ` - ? : 2020-01-01 # --- ... NaN Infinity {"a":1e400} [1e999] "\ud83d" {"role":5} [{"role":5}] {"":{}}
!!python/object/apply:pathlib.Path[5] \u0000"""
WORDS = [*_WORDS.split(), "\t", "\u2028", "\x85"]
WORDS += [*["1", "2", "8", "0.5", "true", "false", "x", "auto", "[a,b]", "[0.1,0.9]", "{}", "null"]] * 3
WORDS += [
    "9" * 5000,
    "0x" + "f" * 5000,
    "[" * 70 + "]" * 70,
    "[" * 2000 + "]" * 2000,
    "{a: " * 60 + "}" * 60,
    "x" * 5000,
]
WORDS += ['{"a":' * 600 + "1" + "}" * 600, "\n" * 50, "a: {}\n" * 50, "\ufeff", "\x00", "é", "\U0001f600"]


def mutated(text: str, draw: random.Random) -> bytes:
    """``text`` with one to four things done to it."""
    data = text.encode()
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        to = min(to, at + draw.choice((1, 4, 30, 400)))
        word = draw.choice(WORDS).encode("utf-8", "surrogatepass")
        kind = draw.randrange(7)
        if kind == 0:  # a bit
            data = data[:at] + bytes([(data[at : at + 1] or b"\0")[0] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:to] + data[at:]
        elif kind == 3:
            data = data[:at] + word + data[at:]
        else:  # the value, or the key, of a line or of a pair
            mark = data.find(b":", at)
            end = min((e for e in (data.find(c, mark) for c in (b"\n", b",", b"}")) if e > mark), default=len(data))
            begin = max(data.rfind(c, 0, mark) + 1 for c in (b"\n", b",", b"{")) if mark > 0 else at
            data = (data[:begin] + word + data[mark:]) if kind == 4 else (data[: mark + 1] + b" " + word + data[end:])
    return data


def structured(text: str, draw: random.Random) -> bytes:
    """``text`` with the value of some key replaced by something that YAML can hold."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return text.encode()
    at: Any = data
    while isinstance(at, dict) and at:
        name = draw.choice(list(at))
        if not isinstance(at[name], (dict, list)) or draw.random() < 0.25:
            try:
                at[name] = yaml.safe_load(draw.choice(WORDS))
            except Exception:  # PyYAML's own loader cannot read some of these
                at[name] = draw.choice(
                    (2**63, -(2**70), 1e30, 1e5, "", " ", 0.5, [None], {"a": {"b": [1]}}, True, None)
                )
            break
        at = at[name]
    try:
        return yaml.safe_dump(data, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutated(text, draw)


def tried_file(path: Path, overrides: list[str]) -> str:
    """What became of a file: ``taken``, or ``refused``."""
    try:
        config = load_config(path, overrides)
        with contextlib.suppress(ConfigError):
            check_capabilities(config, Capabilities(trains=True, honours=frozenset({"trainer_common"})))
    except AstunerError as e:
        text = str(e)
        assert 0 < len(text.strip()) < 200_000, f"no message, or {len(text)} characters"
        return "refused"
    again = path.with_name("again.yaml")
    again.write_text(config.dump_yaml(), encoding="utf-8")
    load_config(again)
    return "taken"


def tried_line(path: Path, on_bad_line: Any) -> str:
    reader = JsonlTaskReader(
        JsonlConfig.model_validate({"training": {"file_path": str(path)}}), path.parent, on_bad_line
    )
    try:
        for task in reader.read(Split.TRAIN):
            json.dumps([task.main_query, list(task.init_messages), dict(task.metadata)], allow_nan=False).encode()
            task.main_query.encode()
    except AstunerError:
        return "refused"
    return "skipped" if reader.skipped else "taken"


def fuzz(number: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """What became of ``number`` files and as many lines; and what went wrong, each with how to have it again."""
    counts, wrong, slowest = Counter[str](), list[str](), 0.0
    keys = [key for key, _, _ in load_config(ROOT / "examples/werewolves/werewolves.yaml").items()]
    for i in range(number):
        draw = random.Random(f"{seed}/{i}")
        text = draw.choice(FILES).read_text(encoding="utf-8")
        file, data = folder / "experiment.yaml", folder / "tasks.jsonl"
        file.write_bytes(structured(text, draw) if draw.random() < 0.4 else mutated(text, draw))
        over = [f"{draw.choice(keys)}={draw.choice(WORDS)}"] if draw.random() < 0.3 else []
        line = draw.choice(LINES)
        data.write_bytes(mutated(line, draw) + b"\n" + LINES[0].encode() + b"\n")
        for name, call in (
            ("file", partial(tried_file, file, over)),
            ("line", partial(tried_line, data, "stop")),
            ("line, skip", partial(tried_line, data, "skip")),
        ):
            began = time.perf_counter()
            try:
                counts[f"{name} {call()}"] += 1
            except BaseException:
                if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                    raise
                kept = folder / f"wrong-{seed}-{i}-{(file if name == 'file' else data).name}"
                kept.write_bytes((file if name == "file" else data).read_bytes())
                wrong.append(f"{kept} {over if name == 'file' else name}: {traceback.format_exc()[-3000:]}")
            slowest = max(slowest, time.perf_counter() - began)
    counts["slowest, in ms"] = round(slowest * 1000)
    return counts, wrong


@pytest.mark.slow
def test_no_mutated_file_or_line_gives_a_traceback(tmp_path: Path):
    counts, wrong = fuzz(300, 19, tmp_path)
    assert not wrong, "\n\n".join(wrong[:3])
    assert all(counts[f"{what} {how}"] > 10 for what in ("file", "line") for how in ("taken", "refused")), counts


if __name__ == "__main__":
    found, failed = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 19, Path(tempfile.mkdtemp()))
    print(dict(found), *failed[:10], f"{len(failed)} tracebacks", sep="\n\n")
