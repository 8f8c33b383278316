"""Start a zygote in another interpreter: lend it this package and the core.

Call it as ``python -I start.py DESCRIPTOR CORE``, with the descriptor of the control socket and the directory of the
core.

Only the lent names become importable, from their own directories; other modules in these directories do not. A lent
package takes precedence over an installed one of the same name, so that both sides run the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class Lender(MetaPathFinder):
    """Find lent packages; their modules are found through the package."""

    def __init__(self, lent: Mapping[str, str]) -> None:
        self.lent = dict(lent)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self.lent.get(fullname)
        if place is None:
            return None
        if place.endswith(".py"):
            return spec_from_file_location(fullname, place)
        return spec_from_file_location(fullname, str(Path(place, "__init__.py")), submodule_search_locations=[place])


def lend(lent: Mapping[str, str]) -> None:
    """Make packages importable, by top-level name and absolute path of the directory or ``.py`` file.

    :raises ValueError: A path is not a package or module, or a name is not top-level.
    """
    for name, place in lent.items():
        start = Path(place) if place.endswith(".py") else Path(place, "__init__.py")
        if "." in name or not start.is_absolute() or not start.is_file():
            raise ValueError(f"cannot lend {name} from {place}. Pass the absolute directory of a top-level package")
    sys.meta_path.insert(0, Lender(lent))


if __name__ == "__main__":
    lend({"astuner": sys.argv[2], "astuner_sandbox": str(Path(__file__).absolute().parents[1])})

    from astuner_sandbox.isolation.zygote_process import main

    main(int(sys.argv[1]))
