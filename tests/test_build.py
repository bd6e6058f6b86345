# SPDX-License-Identifier: Apache-2.0
"""The package from the outside: what it builds from, what it builds to, what it says of itself.

The slow tests build in pip's isolated environment, so they need a package index and a C++ compiler.
"""

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pybind11
import pytest

import zenflow

ROOT = Path(__file__).resolve().parent.parent
OTHER_PYTHONS = [f"3.{minor}" for minor in range(10, 16) if minor != sys.version_info.minor]


def run(*command, check=True, **settings):
    settings = {"capture_output": True, "text": True, "timeout": 600, **settings}
    done = subprocess.run([str(part) for part in command], check=False, **settings)
    assert not check or done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def plain_environment(**extra):
    """The environment without what would steer a build."""
    steering = {"CUDACXX", "CUDA_HOME", "CUDA_PATH", "CXXFLAGS", "CMAKE_ARGS", "PYTHONPATH", "ZENFLOW_ISA"}
    return {name: value for name, value in os.environ.items() if name not in steering} | extra


def path_without_nvcc(folder):
    """A PATH with every program but nvcc: links to its neighbours stand in for a folder that has it."""
    folders = []
    for n, name in enumerate(os.environ["PATH"].split(os.pathsep)):
        if not (Path(name) / "nvcc").exists():
            folders.append(name)
            continue
        links = folder / f"bin{n}"
        links.mkdir(parents=True)
        for program in Path(name).iterdir():
            if program.name != "nvcc":
                (links / program.name).symlink_to(program)
        folders.append(str(links))
    return os.pathsep.join(folders)


def fresh_source(folder):
    """What git would commit from the working tree, without builds."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def find_python(version):
    """A python3.X that runs: on PATH, or installed beside the interpreter that we run on."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*{version}*/bin/python{version}"))
    for candidate in [shutil.which(f"python{version}"), *map(str, beside)]:
        if candidate and run(candidate, "-c", "import ensurepip, venv", check=False).returncode == 0:
            return candidate
    return None


OTHER_PYTHON = next((version for version in OTHER_PYTHONS if find_python(version)), None)


def install_in_new_environment(python, what, folder):
    """Build in isolation, without torch and without nvcc, and return the new environment's interpreter."""
    environment = plain_environment(PATH=path_without_nvcc(folder / "path"))
    run(python, "-m", "venv", folder / "venv")
    new_python = folder / "venv" / "bin" / "python"
    run(new_python, "-m", "pip", "install", what, env=environment, cwd=folder)
    return new_python


def assert_reports_what_is_missing(python, folder):
    report = run(python, "-m", "zenflow", cwd=folder, env=plain_environment()).stdout
    assert report.startswith(f"zenflow {zenflow.__version__}\n")
    assert "torch is not installed" in report
    assert "nvcc not found" in report
    refused = run(python, "-c", "from zenflow import ZenFlowOptimizer", cwd=folder, check=False)
    assert refused.returncode == 1
    assert "ImportError: zenflow.ZenFlowOptimizer needs torch" in refused.stderr


def files_below(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_sdist_installs_without_torch_and_nvcc(tmp_path):
    source = fresh_source(tmp_path / "source")
    run(sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('dist')", cwd=source)
    (sdist,) = (source / "dist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")

    python = install_in_new_environment(sys.executable, unpacked, tmp_path)
    assert_reports_what_is_missing(python, tmp_path)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages/zenflow")
    names = files_below(installed)
    (binary,) = (name for name in names if name.startswith("_C.") and name.endswith(".so"))
    assert names - {binary} == {name for name in files_below(ROOT / "python/zenflow") if not name.endswith(".so")}

    exported = run("nm", "-D", "--defined-only", installed / binary).stdout.splitlines()
    assert [symbol.split()[-1] for symbol in exported if symbol.split()[1] not in "WVu"] == ["PyInit__C"]
    # A weak symbol compiled for AVX-512 may be the one that the linker keeps for code that runs anywhere.
    objects = [*unpacked.glob("build/**/kernels_avx*.o")]
    assert len(objects) == (2 if platform.machine() == "x86_64" else 0)
    for path in objects:
        symbols = run("nm", "-C", "--defined-only", path).stdout.splitlines()
        isa = path.name.partition("_")[2].partition(".")[0]
        weak = [symbol for symbol in symbols if symbol.split()[1] in "WVu"]
        assert [symbol for symbol in weak if f" zenflow::{isa}::" not in symbol] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_other_python(version, tmp_path):
    if version != OTHER_PYTHON and "ZENFLOW_TEST_ALL_PYTHONS" not in os.environ:
        pytest.skip(f"{OTHER_PYTHON} is enough; ZENFLOW_TEST_ALL_PYTHONS=1 tries every one")
    other = find_python(version)
    if other is None:
        pytest.skip(f"no python{version} that runs and can make environments")
    python = install_in_new_environment(other, fresh_source(tmp_path / "source"), tmp_path)
    assert_reports_what_is_missing(python, tmp_path)


@pytest.mark.parametrize("option", [[], ["--help"], ["--version"]])
def test_a_reader_that_leaves_early_sees_no_traceback(option):
    """As in `python -m zenflow | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(
            sys.executable, "-m", "zenflow", *option, stdout=writer, stderr=subprocess.PIPE, capture_output=False
        )
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_every_place_asks_for_the_same_cmake():
    (wanted,) = re.findall(r'"cmake>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (told,) = re.findall(r"needs cmake ([\d.]+) or newer", (ROOT / "setup.py").read_text(encoding="utf-8"))
    files = [ROOT / "CMakeLists.txt", *(ROOT / "tests").glob("*/CMakeLists.txt")]
    required = [
        re.findall(r"cmake_minimum_required\(VERSION ([\d.]+?)\.\.\.", path.read_text(encoding="utf-8"))
        for path in files
    ]
    assert [told, *(version for (version,) in required)] == [wanted] * 4


def configure(tmp_path, *definitions, check=True, **environment):
    """Configure without building; returns CMake's output."""
    environment = plain_environment(**environment)
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *definitions,
    ]
    done = run(*command, env=environment, check=check)
    return done.stdout + done.stderr


def test_user_flags_cannot_change_the_arithmetic(tmp_path):
    flags = "-Ofast -ffast-math -fassociative-math -ffp-contract=fast -march=native"
    configure(tmp_path, "-DZENFLOW_CUDA=OFF", CXXFLAGS=flags)
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    assert any(entry["file"].endswith("kernels_scalar.cpp") for entry in commands)
    for entry in commands:
        words = entry["command"].split()
        assert "-march=native" in words  # the user's other flags are kept
        assert not {"-Ofast", "-ffast-math"} & set(words)
        assert words.index("-ffp-contract=off") > words.index("-ffp-contract=fast")
        assert words.index("-fno-associative-math") > words.index("-fassociative-math")


def fake_nvcc(folder):
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'unsupported host compiler; \"too new\"' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_broken_nvcc_is_left_aside_with_its_reason(tmp_path):
    output = configure(tmp_path, CUDACXX=fake_nvcc(tmp_path))
    assert "zenflow CUDA half: OFF" in output
    assert "cannot compile" in output
    assert "unsupported host compiler" in output


def test_broken_nvcc_is_an_error_where_cuda_was_asked_for(tmp_path):
    output = configure(tmp_path, "-DZENFLOW_CUDA=ON", CUDACXX=fake_nvcc(tmp_path), check=False)
    assert "Configuring incomplete" in output
    assert "unsupported host compiler" in output


CALLS_WITHOUT_CUDA = """
#include <cstdio>
#include <exception>
#include "cuda/column_norms.h"
#include "cuda/cuda_info.h"
int main() {
  const zenflow::Stream stream = zenflow::Stream::from_handle(0);
  using Error = std::exception;
  try { zenflow::column_norms({}, nullptr, stream); } catch (const Error& e) { puts(e.what()); }
  try { zenflow::column_norms_scratch({}); } catch (const Error& e) { puts(e.what()); }
  try { stream.synchronize(); } catch (const Error& e) { puts(e.what()); }
  return zenflow::cuda_info().built;
}
"""


def compile_options(standard="c++20"):
    return [f"-std={standard}", f"-I{ROOT}", f"-I{ROOT / 'src'}", '-DZENFLOW_CUDA_REASON="nvcc not found"']


def test_without_cuda_the_same_symbols_say_what_to_do(tmp_path):
    (tmp_path / "calls.cpp").write_text(CALLS_WITHOUT_CUDA)
    no_cuda = ROOT / "cuda" / "no_cuda.cpp"
    run("c++", *compile_options(), tmp_path / "calls.cpp", no_cuda, "-o", tmp_path / "calls")
    messages = run(tmp_path / "calls").stdout.splitlines()
    assert len(messages) == 3
    for message in messages:
        assert "needs CUDA, but zenflow was built without it: nvcc not found" in message
        assert "Rebuild with CUDACXX" in message


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, to compare with what it builds")
def test_no_cuda_has_every_symbol(tmp_path):
    def symbols(source):
        device = source.suffix == ".cu"
        compiler = ["nvcc", "-arch=sm_80", *compile_options("c++17")] if device else ["c++", *compile_options()]
        run(*compiler, "-c", source, "-o", tmp_path / "object.o")
        lines = run("nm", "-C", "--defined-only", tmp_path / "object.o").stdout.splitlines()
        public = [line for line in lines if "(anonymous namespace)" not in line]
        return {line[19:] for line in public if line[17:].startswith("T zenflow::")}

    with_cuda = set().union(*map(symbols, sorted((ROOT / "cuda").glob("*.cu"))))
    assert any("column_norms(" in symbol for symbol in with_cuda)
    without = symbols(ROOT / "cuda" / "no_cuda.cpp")
    assert with_cuda <= without
    assert [symbol.partition("(")[0] for symbol in without - with_cuda] == [
        "zenflow::make_cuda_device"
    ]  # of device.cpp


@pytest.mark.parametrize("argument", ["0", "nullptr", "NULL"])
def test_a_stream_is_not_made_from_a_literal_zero(argument, tmp_path):
    source = tmp_path / "stream.cpp"
    source.write_text(f'#include "cuda/stream.h"\nzenflow::Stream stream({argument});\n')
    done = run("c++", *compile_options(), "-fsyntax-only", source, check=False)
    assert done.returncode != 0
    assert "deleted" in done.stderr or "ambiguous" in done.stderr


def test_layers():
    run(ROOT / "tests" / "check_layers.sh")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("src/x.cpp", "#include <torch/extension.h>"),
        ("src/x.h", "#include <Python.h>"),
        ("src/x.h", '#include "cuda/stream.h"'),
        ("cuda/x.cu", "#include <pybind11/pybind11.h>"),
        ("cuda/stream.h", "#include <cuda_runtime.h>"),
        ("src/kernels_avx2.cpp", "#  include <vector>"),
        ("src/bindings.cpp", "#include <ATen/ATen.h>"),
        ("python/zenflow/state.py", "    from transformers import Trainer"),
        ("python/zenflow/planning/units.py", "import transformers"),
        ("python/zenflow/__init__.py", "from zenflow.integrations.lightning import ZenFlowCallback"),
    ],
)
def test_layer_check_finds(path, line, tmp_path):
    for folder in ("src", "cuda", "python"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    with open(tmp_path / path, "a") as file:
        file.write(f"\n{line}\n")
    done = run(ROOT / "tests" / "check_layers.sh", tmp_path, check=False)
    assert done.returncode == 1
    assert line in done.stdout


def test_config_tells_build_and_machine():
    config = zenflow.config()
    assert config.version == zenflow.__version__ == metadata.version("zenflow")
    assert config.torch == metadata.version("torch")
    assert config.isa in config.isa_available
    assert config.isa_available[0] == "scalar"
    assert set(config.cpus) <= os.sched_getaffinity(0)
    assert config.threads >= 1
    assert config.host_memory > 0
    assert config.cuda_reason
    assert bool(config.cuda_runtime) == config.cuda_built
    assert all(getattr(config, field.name) is not None for field in dataclasses.fields(config))


def zenflow_module(*arguments, check=True, **environment):
    return run(sys.executable, "-m", "zenflow", *arguments, check=check, env=plain_environment(**environment))


def test_report():
    report = zenflow_module().stdout
    assert report.startswith(f"zenflow {zenflow.__version__}\n")
    for name in ("torch", "ISA", "cores", "host memory", "compiler", "CUDA"):
        assert f"\n  {name} " in report


def test_report_names_what_is_missing():
    there = dataclasses.replace(zenflow.config(), cuda_built=True, cuda_devices=1)
    there = dataclasses.replace(there, isa="avx2", isa_available=("scalar", "avx2"))
    assert there.missing() == []
    for change, word in [
        ({"torch": None}, "torch is not installed"),
        ({"torch": "2.3.1"}, "too old"),
        ({"cuda_built": False, "cuda_reason": "nvcc not found"}, "nvcc not found"),
        ({"cuda_devices": 0}, "no device"),
        ({"isa": "scalar", "isa_available": ("scalar",)}, "AVX2"),
    ]:
        (line,) = dataclasses.replace(there, **change).missing()
        assert word in line
        assert line in str(dataclasses.replace(there, **change))


@pytest.mark.parametrize("isa", zenflow.config().isa_available)
def test_isa_can_be_forced(isa):
    assert f"ISA          {isa} (of" in zenflow_module(ZENFLOW_ISA=isa).stdout


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", " "])
def test_unknown_isa_is_an_error_that_lists_what_is_there(isa):
    done = zenflow_module(check=False, ZENFLOW_ISA=isa)
    assert done.returncode != 0
    assert f"{isa}" in done.stderr
    for available in zenflow.config().isa_available:
        assert available in done.stderr


def test_importing_zenflow_does_not_import_torch():
    run(sys.executable, "-c", "import sys, zenflow; zenflow.config(); assert 'torch' not in sys.modules")


def test_module_names():
    assert set(zenflow.__all__) <= set(dir(zenflow))
    with pytest.raises(AttributeError, match="no attribute 'ZenflowOptimizer'"):
        _ = zenflow.ZenflowOptimizer
