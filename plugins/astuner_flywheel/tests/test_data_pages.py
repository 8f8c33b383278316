"""The commands of docs/dataset_from_docs.md and docs/dataset_expansion.md, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from astuner.cli import main
from astuner.testing import ScriptedModel
from tests.table import table

from ._files import make_pdf
from ._writer import expander, rows, sentences, writer

DOCS = Path(__file__).parents[3] / "docs"


@table(
    ("page", "reply", "folder", "count"),
    [("dataset_from_docs.md", lambda: writer, "towns", 20), ("dataset_expansion.md", expander, "more", 23)],
)
def test_the_commands_of_the_page_make_tasks(tmp_path, monkeypatch, capsys, page, reply, folder, count):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_pdf(tmp_path / "handbook.pdf", [" ".join(sentences(5)), " ".join(sentences(5, 5))])
    (tmp_path / "manuals" / "new").mkdir(parents=True)
    (tmp_path / "manuals" / "new" / "a.md").write_text("\n\n".join(sentences(10, 10)), encoding="utf-8")
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    with ScriptedModel(reply()) as server:
        address = f"astuner.helper_models.writer.base_url={server.base_url}"
        for line in block.splitlines():
            with pytest.raises(SystemExit) as ended:
                main([*shlex.split(line)[1:], address, "astuner.task_reader.data_generation.tasks=20"])
            assert ended.value.code == 0, capsys.readouterr().err
    made = rows(tmp_path / "generated" / folder / "train.jsonl")
    made += rows(tmp_path / "generated" / folder / "validation.jsonl")
    assert len(made) == count
    assert "20 of 20 tasks" in capsys.readouterr().out
