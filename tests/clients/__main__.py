"""``python -m tests.clients [NAME…] [--table]``: run clients as agents of real runs; README.md says how."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from typing import Any

from tests.clients.harness import CACHE, FOUND, IN_CI, Client, clients, differs, environment, missing, model, run
from tests.clients.table import write


def result(client: Client) -> dict[str, Any]:
    """What became of one client: what `run` found, or ``failed`` or ``not_run`` with a reason."""
    if why := missing(client):
        return {"not_run": why}
    try:
        found = run(client, CACHE / "runs" / client.name)
    except (AssertionError, subprocess.SubprocessError, OSError) as e:
        (CACHE / "runs").mkdir(parents=True, exist_ok=True)
        (CACHE / "runs" / f"{client.name}.error").write_text(str(e), encoding="utf-8")
        why = re.sub(r" \(\S+program\.py:.*", "", str(e).strip(), flags=re.DOTALL)[-400:]
        return {"failed": why.replace(f"{CACHE}/", "")}
    return found


def main() -> int:
    known = clients()
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Run clients as agents of real runs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all without one")
    parser.add_argument("--table", action="store_true", help="write what was found into docs/frameworks.md")
    parser.add_argument(
        "--prepare", action="store_true", help=f"only make environments: of {', '.join(IN_CI)}, or of NAMEs"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(known)}")
    if options.prepare:
        model()
        for name in options.names or IN_CI:
            environment(known[name])
        return 0
    failed = 0
    for name in options.names or known:
        began = time.monotonic()
        print(f"{name:22} ", end="", flush=True)
        found = result(known[name])
        wrong = differs(known[name], found) if "turns" in found else ""
        failed += "failed" in found or bool(wrong)
        print(f"{time.monotonic() - began:5.0f} s  {json.dumps(found, ensure_ascii=False)}  {wrong}", flush=True)
        if options.table:  # after each, for all of them take half an hour
            results = json.loads(FOUND.read_text(encoding="utf-8"))
            if name not in results or "not_run" not in found:  # what another machine found stays
                results[name] = found
            FOUND.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
            write()
    return int(failed > 0)


sys.exit(main())
