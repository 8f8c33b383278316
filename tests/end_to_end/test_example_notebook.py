"""The example notebook runs as a reader runs it, and shows bar, curve and table; errors are one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "tune.ipynb"
MORE = (
    'small = dict(tasks=rows[:8], model="tiny-calculator", settings={"astuner.trainer_common.total_steps": 2,'
    ' "astuner.data.train_batch_size": 4})',
    'handle = astuner.tune(solve, judge="math_answer", name="handle", wait=False, **small)\nhandle',
    "handle.result();",
    'astuner.tune(solve, judge="math_answr", name="wrong", **small)',
    'astuner.tune(solve, name="no_judge", **small)',
)
"""Cells that the test appends: a handle, and two mistakes."""


def data(cell: Any, kind: str = "text/html") -> list[str]:
    return [output["data"][kind] for output in cell["outputs"] if kind in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_shows_bar_curve_and_table_and_errors_without_a_traceback(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    added = [nbformat.v4.new_code_cell(source) for source in MORE]
    for cell in added[-2:]:
        cell["metadata"]["tags"] = ["raises-exception"]
    notebook.cells += added
    updates: list[str] = []

    class Client(NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                updates.append(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    tuned, result, frame, plot, failed = [cell for cell in notebook.cells if cell["cell_type"] == "code"][2:7]
    running = [update for update in updates if "<b>notebook</b>: running" in update]
    assert len(running) >= 2
    assert any("<progress" in update and "<svg" in update and "</table>" in update for update in running)
    (live,) = data(tuned)
    assert '<progress max="30" value="30">' in live
    for html in (live, *data(result)):
        assert "<b>notebook</b>: Learned: " in html
        assert '<th scope="row">reward/mean</th>' in html
        assert "<svg" in html
    assert "val/success" in data(frame)[0]
    assert "<svg" in data(plot)[0]
    assert "advantage of default" in data(failed)[0] or "every episode" in data(failed, "text/plain")[0]
    (handle,) = data(added[1])
    assert '<progress max="2" value="2">' in handle
    assert ": running" not in handle
    for cell, message in zip(added[-2:], ("did you mean math_answer?", "returned no reward and no judge"), strict=True):
        (error,) = [output for output in cell["outputs"] if output["output_type"] == "error"]
        assert message in error["evalue"]
        assert len(error["traceback"]) == 1
        assert error["traceback"][0].count("\n") < 5
