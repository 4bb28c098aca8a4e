"""Whose a file is: an installed package's, Python's, headway's, or the program's own."""

import os
import sys

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NOBODYS = ("<", os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def file_of(name: str) -> str:
    """The file of an imported module; empty if it has none."""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def is_installed(file: str) -> bool:
    """Whether a file is part of an installed package."""
    return any(folder in file for folder in _INSTALLED)


def is_own(file: str) -> bool:
    """Whether a file is the program's own."""
    return bool(file) and not is_installed(file) and not file.startswith(_NOBODYS)
