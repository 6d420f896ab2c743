"""Builds the two parts in C: the sandbox helper, a small program, and the kernels, a small library.

Everything else is in pyproject.toml. Without a C compiler strop installs all the same: sandboxes are then missing, and
sampler and learner go through PyTorch alone; `strop doctor` says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

HELPER, KERNELS = Path("src/strop/sandboxes/helper"), Path("src/strop/kernels")
HELPER_FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"]
# No -march: the library holds a version for each level of the processor and chooses when it is loaded.
LIBRARY_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-Wno-psabi"]


class BuildNative(build_ext):
    """Links a program and a plain shared library, neither of them a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ("" if fullname.endswith("_helper") else ".so")

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []

    def build_extension(self, extension: Extension) -> None:
        target = self.get_ext_fullpath(extension.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        (self._program if extension.name.endswith("_helper") else self._library)(extension, target)

    def _program(self, extension: Extension, target: str) -> None:
        objects = self.compiler.compile(extension.sources, output_dir=self.build_temp, extra_postargs=HELPER_FLAGS)
        try:
            self.compiler.link_executable(objects, target, extra_postargs=["-static", "-s"])
        except CCompilerError:  # no static C library: larger in memory, otherwise the same
            self.compiler.link_executable(objects, target)

    def _library(self, extension: Extension, target: str) -> None:
        threads = ["-fopenmp"]
        try:
            objects = self._compile(extension, threads)
        except CompileError:  # no OpenMP: one thread
            threads = []
            objects = self._compile(extension, threads)
        self.compiler.link_shared_object(objects, target, extra_postargs=threads)

    def _compile(self, extension: Extension, threads: list[str]) -> list[str]:
        flags = [*LIBRARY_FLAGS, *threads]
        return self.compiler.compile(extension.sources, output_dir=self.build_temp, extra_postargs=flags)


class PlainWheel(bdist_wheel):
    """The parts in C are bound to the platform but to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


EXTENSIONS = [
    Extension(
        "strop.kernels.native",
        sorted(str(path) for path in KERNELS.glob("*.c")),
        depends=[str(KERNELS / "vectors.h")],
        optional=True,
    )
]
if sys.platform == "linux":
    EXTENSIONS.append(
        Extension(
            "strop.sandboxes.zygote_helper",
            sorted(str(path) for path in HELPER.glob("*.c")),
            depends=[str(HELPER / "helper.h")],
            optional=True,
        )
    )

setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildNative, "bdist_wheel": PlainWheel})
