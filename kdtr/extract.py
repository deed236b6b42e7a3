"""Tensors of a file as files of their own: .npy, or their bytes where NumPy lacks the type or they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kdtr import dtypes
from kdtr.container import Container, PathLike
from kdtr.errors import EncodeError, FileIOError, TensorNameError
from kdtr.foreign import whole_file
from kdtr.index import name_fault

Progress = Callable[[int], object]
_RAW_SUFFIX: Final = ".bin"


class Extracted(NamedTuple):
    """A written file: its path below the folder, and the tensor in it."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def extract(
    container: Container,
    folder: PathLike,
    names: Iterable[str] | None = None,
    *,
    raw: bool = False,
    replace: bool = False,
    progress: Progress | None = None,
) -> list[Extracted]:
    """Write tensors, all or some, verified, as `<folder>/<name>.npy`; C order, little-endian.

    With `raw`, and for types that NumPy lacks, as `<name>.<dtype>.bin`: the payload's bytes. The plan is checked before
    anything is written. Raises NAME for names that could leave the folder, ENCODE for names that differ only in case or
    need a file where another needs a folder, NOT_FOUND, and IO where a file exists unless `replace` is given.
    """
    root = Path(os.path.realpath(folder))
    plan: dict[str, str] = {}
    for name in container.names if names is None else names:
        native = dtypes.BY_NAME[container.info[name].dtype].library == "numpy"
        if fault := name_fault(name.encode()):
            raise TensorNameError(fault, path=container.path, tensor=name)
        suffix = f".{container.info[name].dtype}{_RAW_SUFFIX}" if raw or not native else ".npy"
        plan[name] = name + suffix
    _check_plan(container.path, plan)
    for file in plan.values():
        target = root / file
        if root not in Path(os.path.realpath(target)).parents:
            raise FileIOError(f"'{file}' would leave the folder '{folder}' through a link", path=container.path)
        if not replace and os.path.lexists(target):
            raise FileIOError("exists already", path=os.fspath(target))
    written = []
    for name, file in plan.items():
        info = container.info[name]
        payload = container.raw(name)
        target = root / file
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as temporary, open(temporary, "xb") as out:
                if file.endswith(".npy"):
                    dtype = dtypes.BY_NAME[info.dtype].numpy().newbyteorder("<")
                    header = {"descr": dtype.str, "fortran_order": False, "shape": info.shape}
                    np.lib.format.write_array_header_1_0(out, header)
                out.write(np.asarray(payload.data).data)
        except OSError as error:
            raise FileIOError(f"cannot be written: {error}", path=os.fspath(target), tensor=name) from error
        written.append(Extracted(file, name, info.dtype, info.shape, info.nbytes))
        if progress:
            progress(info.nbytes)
    return written


def _check_plan(path: str, plan: dict[str, str]) -> None:
    """Some systems take names that differ in case for one, and none has a file and a folder of one name."""
    files: dict[str, str] = {}
    for name, file in plan.items():
        if (other := files.setdefault(file.casefold(), name)) != name:
            raise EncodeError(
                f"'{other}' and '{name}' differ only in case: extract them one by one", path=path, tensor=name
            )
    folders: dict[str, tuple[str, str]] = {}
    for name, file in plan.items():
        parts = file.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if (owner := files.get(folder.casefold())) is not None:
                raise EncodeError(f"needs a folder where '{owner}' needs a file", path=path, tensor=name)
            first, spelled = folders.setdefault(folder.casefold(), (name, folder))
            if spelled != folder:
                raise EncodeError(
                    f"'{spelled}' of '{first}' and '{folder}' differ only in case", path=path, tensor=name
                )
