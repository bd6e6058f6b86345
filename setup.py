# SPDX-License-Identifier: Apache-2.0
"""Hands zenflow._C to CMake. Settings: CMAKE_ARGS; CMAKE_BUILD_PARALLEL_LEVEL, else the cores we may use."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        import pybind11

        here = Path(__file__).resolve().parent
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        path = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
        cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
        if cmake is None:
            raise SystemExit("zenflow needs cmake 3.25 or newer to build; install it with: pip install cmake")
        # Not build_temp, which is new for each editable install: builds here are incremental. The folder outlives
        # pip's isolated environments, so what lies in them is named anew each time.
        kind = f"{sys.implementation.cache_tag}-{self.plat_name}-{'ninja' if ninja else 'make'}"
        build = here / "build" / kind
        configure = [cmake, "-S", here, "-B", build, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        jobs = str(self.parallel or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", cores))
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", build, "--target", "_C", "--parallel", jobs], check=True)


setup(ext_modules=[Extension("zenflow._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
