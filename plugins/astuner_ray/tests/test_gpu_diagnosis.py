"""What `astuner doctor` says about any backbone on GPUs, on machines that are not this one."""

import importlib.metadata

import pytest
from packaging.specifiers import SpecifierSet

from astuner_ray.native import gpu_diagnosis
from astuner_ray.native.gpu_diagnosis import ANY, Gpu, GpuBackbone, bound, cuda_of_torch, gpus, version
from tests.table import table

ACME = GpuBackbone(name="acme", title="Acme", install="pip install 'astuner-acme[engine]'")
HEADER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |"
CARD = "NVIDIA H200, NVL, 580.95.05, 140000, 143771\n"
TORCH = SpecifierSet("==2.11.0")


@pytest.fixture
def machine(monkeypatch):
    """Make a machine: `machine(installed, requires, cards, header)`; nothing else is installed on it."""

    def make(installed=None, requires=None, cards=CARD, header=HEADER):
        def metadata(kind):
            def look(name):
                if name not in kind:
                    raise importlib.metadata.PackageNotFoundError(name)
                return kind[name]

            return look

        monkeypatch.setattr(importlib.metadata, "version", metadata(installed or {}))
        monkeypatch.setattr(importlib.metadata, "requires", metadata(requires or {}))
        monkeypatch.setattr(gpu_diagnosis, "nvidia_smi", lambda *arguments: cards if arguments else header)

    return make


def on_gpus(look=ACME.memory):
    return {finding.what: finding for finding in ACME.on_gpus(look)}


def test_what_is_installed(machine):
    machine({"engine": "1.2"})
    assert (version("engine"), version("other")) == ("1.2", None)


@table(
    ("name", "extra", "wanted"),
    [
        ("flash-attn", None, ">=2.8"),
        ("Flash_Attn", None, ">=2.8"),
        ("flash-attn", "", ""),
        ("flash-attn", "fast", ">=2.8"),
        ("engine", None, "==1.0"),
        ("engine", "one", "==1.0"),
        ("engine", "two", "==2.0"),
        ("ray", "", ">=2.50"),
        ("ray", "two", ">=2.50"),
        ("old", "", ""),
        ("unheard-of", None, ""),
    ],
)
def test_which_versions_an_installed_package_asks_for(machine, name, extra, wanted):
    machine(
        requires={
            "trainer": [
                "ray[default]>=2.50",
                "old<1; python_version < '3'",
                "engine==1.0; extra == 'one'",
                "engine==2.0; extra == 'two'",
                "flash_attn>=2.8; extra == 'fast'",
            ]
        }
    )
    assert str(bound("trainer", name, extra)) == wanted


def test_nothing_is_asked_for_by_what_is_not_installed_or_asks_for_nothing(machine):
    machine(requires={"alone": None})
    assert bound("alone", "ray") == bound("missing", "ray") == ANY


def test_gpus_are_read_whatever_their_names(machine):
    machine(cards=CARD + "NVIDIA A100, 580.95.05, 20000, 81920\n")
    assert gpus() == [
        Gpu(name="NVIDIA H200, NVL", driver="580.95.05", free=140000, total=143771),
        Gpu(name="NVIDIA A100", driver="580.95.05", free=20000, total=81920),
    ]


def test_two_backbones_do_not_share_an_environment(machine):
    machine({"astuner-other": "0.1.0"})
    (finding,) = ACME.alone("other", differ="torch")
    assert (finding.what, finding.level) == ("acme and other", "fail")
    assert finding.detail == "astuner-other 0.1.0 is in the same environment, but the two need different torch"
    assert finding.fix == (
        "python3 -m venv .venv-acme && . .venv-acme/bin/activate && pip install 'astuner-acme[engine]'"
    )
    machine()
    assert list(ACME.alone("other", differ="torch")) == []


@table(
    ("have", "level", "detail"),
    [
        ("1.0", "ok", "1.0"),
        ("1.1rc1", "fail", "1.1rc1, but trainer==1.0 is needed: it broke"),
        (None, "fail", "not installed; the acme backbone cannot start without it"),
    ],
)
def test_a_package_that_has_to_be_here(machine, have, level, detail):
    machine({"trainer": have} if have else {})
    finding = ACME.package("trainer", wanted=SpecifierSet("==1.0"), why="it broke", fix="pip install it")
    assert (finding.what, finding.level, finding.detail) == ("trainer", level, detail)
    assert finding.fix == ("" if level == "ok" else "pip install it")


@table(
    ("installed", "wanted", "fix"),
    [
        ("2.12.0+cpu", TORCH, "pip install --force-reinstall 'torch==2.11.0'"),
        ("2.12.0+cpu", ANY, "pip install --force-reinstall 'torch==2.12.0'"),
        (None, TORCH, "pip install 'astuner-acme[engine]'"),
    ],
)
def test_torch_has_to_be_for_gpus(machine, installed, wanted, fix):
    machine({"torch": installed} if installed else {})
    (finding,) = ACME.torch(gpus(), wanted)
    assert (finding.what, finding.level, finding.fix) == ("acme's torch", "fail", fix)
    assert "NVIDIA H200, NVL" in finding.detail


def test_a_driver_that_is_new_enough_for_torch(machine):
    machine({"torch": "2.11.0+cu130"})
    (finding,) = ACME.torch(gpus(), TORCH)
    assert (finding.level, finding.detail) == ("ok", "580.95.05, CUDA up to 13.0; torch 2.11.0+cu130")


def test_a_driver_that_is_too_old_for_torch(machine):
    machine({"torch": "2.11.0+cu130"}, cards=CARD.replace("580.95.05", "550.54.15"), header="CUDA Version: 12.4")
    (finding,) = ACME.torch(gpus(), TORCH)
    assert (finding.what, finding.level) == ("NVIDIA driver", "fail")
    assert finding.detail == (
        "550.54.15 supports CUDA up to 12.4, but torch 2.11.0+cu130 is built for CUDA 13, which needs "
        "driver 580 or newer"
    )
    assert "nvidia-driver-580" in finding.fix


def test_a_torch_from_pypi_says_its_cuda_in_what_it_requires(machine):
    machine(requires={"torch": ["sympy", "nvidia-cudnn-cu13==9.13; platform_system == 'Linux'"]})
    assert cuda_of_torch("2.11.0") == "13"
    machine(requires={"torch": None})
    assert cuda_of_torch("2.11.0") == "unknown"
    assert cuda_of_torch("2.11.0+cpu") is None


def test_flash_attention_that_is_missing_says_what_is_taken_instead(machine):
    machine()
    finding = ACME.flash_attention(SpecifierSet(">=2.8"))
    assert (finding.level, finding.fix) == ("warn", "pip install --no-build-isolation 'flash-attn>=2.8'")
    assert "sdpa" in finding.detail
    machine({"flash-attn": "2.8.3"})
    assert ACME.flash_attention(ANY).level == "ok"


def test_a_card_that_somebody_uses(machine):
    machine(cards=CARD + "NVIDIA H200, 580.95.05, 20000, 143771\n")
    found = on_gpus()
    assert (found["GPU 0"].level, found["GPU 1"].level) == ("ok", "warn")
    assert found["GPU 0"].detail == "NVIDIA H200, NVL, 136.7 of 140.4 GiB free"
    assert "19.5 of 140.4 GiB free; Acme takes" in found["GPU 1"].detail


@pytest.mark.parametrize(
    ("platform", "installed", "what", "level", "says"),
    [
        ("", {}, "acme's GPU", "warn", "pip install astuner-acme-cpu; ACME_PLATFORM=cpu)"),
        ("cpu", {}, "acme on a CPU", "fail", "pip install astuner-acme-cpu"),
        (" CPU", {"astuner-acme-cpu": "0.1.0"}, "acme on a CPU", "ok", "astuner-acme-cpu 0.1.0"),
    ],
)
@pytest.mark.parametrize("shown", [None, ""])
def test_without_a_gpu_that_alone_is_said(machine, monkeypatch, platform, installed, what, level, says, shown):
    monkeypatch.setenv("ACME_PLATFORM", platform)
    machine(installed, cards=shown, header=shown)
    found = on_gpus()
    assert [(f.what, f.level) for f in found.values()] == [(what, level)]
    assert says in (found[what].fix or found[what].detail)


def test_a_driver_that_hangs_is_not_taken_for_no_gpu(monkeypatch):
    def hangs(*_):
        raise TimeoutError("nvidia-smi does not answer")

    monkeypatch.setattr(gpu_diagnosis, "nvidia_smi", hangs)
    assert [(f.what, f.level, f.detail) for f in on_gpus().values()] == [
        ("NVIDIA driver", "fail", "nvidia-smi does not answer")
    ]
