# SPDX-License-Identifier: Apache-2.0
"""What was built and what is found here: `zenflow.config()`. Sets nothing and does not import torch."""

import dataclasses
import platform
from importlib import metadata

from zenflow import _C

OLDEST_TORCH = (2, 4)
UNKNOWN_BYTES = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Build and machine, as zenflow sees them now. `print(zenflow.config())` gives a report.

    Attributes:
        version: of zenflow.
        python, platform: what runs it.
        torch: installed version; None if it is not installed.
        isa: instruction set in use: "scalar", "avx2" or "avx512". ZENFLOW_ISA forces one.
        isa_available: those that this CPU and build have.
        threads: threads that host updates use by default; the other cores are left to torch.
        cpus: the CPUs that these threads use.
        host_memory: bytes that can still be allocated here, cgroup limits included; None if unknown.
        compiler: of the host code.
        cuda_built: whether the CUDA half is in this build; cuda_reason says with what, or why not.
        cuda_runtime: version of the CUDA runtime linked in; "" without.
        cuda_devices: devices visible; 0 without a driver.
    """

    version: str
    python: str
    platform: str
    torch: str | None
    isa: str
    isa_available: tuple[str, ...]
    cpus: tuple[int, ...]
    threads: int
    host_memory: int | None
    compiler: str
    cuda_built: bool
    cuda_reason: str
    cuda_runtime: str
    cuda_devices: int

    def missing(self):
        """What is not there, one line each with what to do."""
        lines = []
        if self.torch is None:
            lines.append("torch is not installed, and ZenFlowOptimizer needs it: pip install torch")
        elif _leading_numbers(self.torch) < OLDEST_TORCH:
            lines.append(f"torch {self.torch} is too old, ZenFlowOptimizer needs 2.4: pip install -U torch")
        if not self.cuda_built:
            lines.append(f"CUDA: {self.cuda_reason}; parameters on a GPU need a build with nvcc")
        elif self.cuda_devices == 0:
            lines.append("CUDA: no device is visible (no GPU, or no driver)")
        if self.isa == "scalar" and len(self.isa_available) == 1:
            lines.append("AVX2: this CPU or build has none, so host updates run the slow portable code")
        return lines

    def __str__(self):
        cuda = f"not built ({self.cuda_reason})"
        if self.cuda_built:
            cuda = f"runtime {self.cuda_runtime}, {self.cuda_devices} device(s) visible ({self.cuda_reason})"
        memory = "unknown" if self.host_memory is None else f"{self.host_memory / 2**30:.1f} GiB available"
        rows = [
            ("python", f"{self.python}, {self.platform}"),
            ("torch", self.torch or "not installed"),
            ("ISA", f"{self.isa} (of {', '.join(self.isa_available)})"),
            ("cores", f"{self.threads} for host updates by default (CPU {_ranges(self.cpus)})"),
            ("host memory", memory),
            ("compiler", self.compiler),
            ("CUDA", cuda),
        ]
        lines = [f"zenflow {self.version}", *(f"  {name:<12} {value}" for name, value in rows)]
        missing = self.missing()
        if missing:
            lines += ["missing", *(f"  {line}" for line in missing)]
        return "\n".join(lines)


def config():
    """Return the `Config` of this process. Environment and affinity are read anew at each call."""
    native = _C.config()
    return Config(
        version=native["version"],
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=_torch_version(),
        isa=native["isa"],
        isa_available=tuple(native["isa_available"]),
        cpus=tuple(native["cpus"]),
        threads=native["threads"],
        host_memory=native["host_memory"] if native["host_memory"] < UNKNOWN_BYTES else None,
        compiler=native["compiler"],
        cuda_built=native["cuda_built"],
        cuda_reason=native["cuda_reason"],
        cuda_runtime=native["cuda_runtime"],
        cuda_devices=native["cuda_devices"],
    )


def _torch_version():
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _leading_numbers(version):
    """(2, 13) of "2.13.0+cpu"; zero where a part is no number."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def _ranges(numbers):
    """ "0-3, 8" of 0, 1, 2, 3, 8."""
    runs = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
