"""Builds the sandbox helper, a small C program, beside the Python package. Everything else is in pyproject.toml.

Without a C compiler, or off Linux, strop installs all the same: `strop doctor` then says what is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

HELPER = Path("src/strop/sandboxes/helper")
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"]


class BuildHelper(build_ext):
    """Links a program, not a module: the agent is forked from it and never loads anything."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/")

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []

    def build_extension(self, extension: Extension) -> None:
        objects = self.compiler.compile(extension.sources, output_dir=self.build_temp, extra_postargs=FLAGS)
        target = self.get_ext_fullpath(extension.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        try:
            self.compiler.link_executable(objects, target, extra_postargs=["-static", "-s"])
        except CCompilerError:  # no static C library: larger in memory, otherwise the same
            self.compiler.link_executable(objects, target)


class PlainWheel(bdist_wheel):
    """The helper is bound to the platform but to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "strop.sandboxes.zygote_helper",
            sorted(str(path) for path in HELPER.glob("*.c")),
            depends=[str(HELPER / "helper.h")],
            optional=True,
        )
    ]
    if sys.platform == "linux"
    else [],
    cmdclass={"build_ext": BuildHelper, "bdist_wheel": PlainWheel},
)
