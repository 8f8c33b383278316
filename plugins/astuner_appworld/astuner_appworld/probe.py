"""Inspect the `appworld` package or unpack a data bundle, as a script in AppWorld's interpreter.

The script uses only the standard library and the package. Inspecting does not import the package, because the import
takes seconds.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return the versions of Python, the package and its database format, and whether the apps are unpacked."""
    spec = importlib.util.find_spec("appworld")
    if spec is None or spec.origin is None:
        return {"python": platform.python_version(), "version": None, "unpacked": False, "db_version": None}
    folder = Path(spec.origin).parent
    constants = (folder / "common" / "constants.py").read_text(encoding="utf-8")
    version = re.search(r'^DB_VERSION\s*=\s*"([^"]+)"', constants, re.MULTILINE)
    return {
        "python": platform.python_version(),
        "version": importlib.metadata.version("appworld"),
        "unpacked": (folder / "apps" / "supervisor" / "apis.py").is_file(),
        "db_version": version[1] if version else None,
    }


def unpack(bundle: str, root: str) -> None:
    """Unpack a data bundle into ``root``."""
    from appworld.common.constants import PASSWORD, SALT
    from appworld.common.utils import unpack_bundle

    unpack_bundle(bundle_file_path=bundle, base_directory=root, password=PASSWORD, salt=SALT)


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        print(json.dumps(facts()))
    else:
        unpack(*sys.argv[2:4])
