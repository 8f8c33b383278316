"""The script that a foreign interpreter starts with: it lends itself this package and the core, and becomes a zygote.

``python -I start.py DESCRIPTOR CORE``; the descriptor is the control socket's, and the core lies in the folder CORE.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).absolute().parent
    spec = importlib.util.spec_from_file_location("_astuner_borrow", here / "borrow.py")
    assert spec is not None
    assert spec.loader is not None
    borrow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(borrow)
    borrow.lend({"astuner": sys.argv[2], "astuner_sandbox": str(here.parent)})

    from astuner_sandbox.isolation.zygote_process import main

    main(int(sys.argv[1]))
