"""HDF5 through h5py (extra `convert`): numeric datasets in groups. What HDF5 can do beyond that is refused by name.

Refused: attributes (unless told to drop them), groups without datasets, soft and external links, external and virtual
storage, named types, null dataspaces, text, enumerations but bool, compounds but complex, opaque, references, arrays as
elements, variable lengths, and numbers in another layout than NumPy's. How bytes are stored (chunks, compression, byte
order, fill values) is not content and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np

from kdtr import dtypes
from kdtr.foreign import BLOCK, DESCRIPTION, NUMPY_NATIVE, Blocks, ConvertError, Format, Item, Stored, little_endian


class Hdf5Source:
    """An open HDF5 file; tensors are named by their paths without the first "/". Raises CONVERT as the module says."""

    def __init__(self, path: str, dropped: Callable[[str], bool], attributes: bool) -> None:
        self._path = path
        self._dropped = dropped
        self._keep_attributes = not attributes
        self._h5py = _h5py()
        self._groups: set[Any] = set()
        self._datasets: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self.text: Mapping[str, str] = {}
        self.description: bytes | None = None
        try:
            self._file = self._h5py.File(path, "r")
        except OSError as error:
            raise ConvertError(f"is not an HDF5 file that can be read: {error}", path=path) from error
        try:
            self._visit("", self._file)
            if DESCRIPTION in self.tensors:
                self.description = b"".join(bytes(block) for block in self.blocks(DESCRIPTION))
                del self.tensors[DESCRIPTION]
        except BaseException:
            self.close()
            raise

    def blocks(self, name: str) -> Blocks:
        """Bytes of a tensor, by blocks of its first axis."""
        dataset, stored = self._datasets[name], self.tensors[name]
        try:
            if not stored.shape or stored.nbytes <= BLOCK:
                yield little_endian(np.asarray(dataset[()]))
                return
            rows = max(1, BLOCK * stored.shape[0] // stored.nbytes)
            for start in range(0, stored.shape[0], rows):
                yield little_endian(dataset[start : start + rows])
        except OSError as error:
            raise self._refuse(name, f"cannot be read: {error}") from error

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _refuse(self, name: str, message: str) -> ConvertError:
        return ConvertError(message, path=self._path, tensor=name)

    def _visit(self, prefix: str, group: Any) -> None:
        """All datasets below a group; `prefix` is the group's path with a "/" at the end."""
        h5py = self._h5py
        info = h5py.h5o.get_info(group.id)
        if (info.fileno, info.addr) in self._groups:
            raise self._refuse(prefix, "the group is reached by two links")
        self._groups.add((info.fileno, info.addr))
        self._check_attributes(prefix or "/", group)
        if prefix and not len(group):
            raise self._refuse(prefix, "the group is empty: KDTR has no groups, only names")
        for key in group:
            name = prefix + key
            if name != DESCRIPTION and self._dropped(name):
                continue
            link = group.get(key, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise self._refuse(
                    name, f"is a {type(link).__name__} to '{link.path}'; only the data itself is carried"
                )
            found = group[key]
            if isinstance(found, h5py.Group):
                self._visit(f"{name}/", found)
            elif isinstance(found, h5py.Dataset):
                self._check_attributes(name, found)
                self._add(name, found)
            else:
                raise self._refuse(name, f"is a {type(found).__name__}, neither group nor dataset")

    def _check_attributes(self, name: str, owner: Any) -> None:
        if self._keep_attributes and len(owner.attrs):
            names = ", ".join(f"'{key}'" for key in list(owner.attrs)[:4])
            raise self._refuse(name, f"has {len(owner.attrs)} attributes ({names}), which KDTR cannot carry: drop them")

    def _add(self, name: str, dataset: Any) -> None:
        if dataset.shape is None:
            raise self._refuse(name, "has a null dataspace: neither shape nor elements")
        if dataset.is_virtual or dataset.external:
            raise self._refuse(name, "keeps its data in other files")
        dtype = dataset.dtype
        found = dtypes.from_numpy(dtype)
        special = self._h5py.check_enum_dtype(dtype) is not None or dtype.hasobject or dtype.subdtype is not None
        if special or found is None or found.name not in NUMPY_NATIVE:
            raise self._refuse(name, f"has HDF5 type {_type_name(dataset)} (NumPy: {dtype}), which KDTR has not")
        if dtype.kind in "iuf" and not self._is_plain(dataset, dtype):
            raise self._refuse(name, f"has an HDF5 number type of another layout than {found.name}")
        self._datasets[name] = dataset
        self.tensors[name] = Stored(found.name, tuple(int(extent) for extent in dataset.shape))

    def _is_plain(self, dataset: Any, dtype: np.dtype[Any]) -> bool:
        """Not a number of odd bits that h5py would widen: equal to what h5py writes for the NumPy type."""
        return bool(dataset.id.get_type() == self._h5py.h5t.py_create(dtype))


def write_hdf5(path: str, items: list[Item], description: bytes, text: Mapping[str, str]) -> None:
    """Make an HDF5 file of contiguous datasets without times; the description is one more dataset of bytes."""
    described = Item(DESCRIPTION, Stored("u8", (len(description),)), lambda: iter([description]))
    names = {item.name for item in items}
    for name in sorted(names):
        for parent in _parents(name):
            if parent in names:
                raise ConvertError(f"HDF5 cannot hold it beside '{name}': it would be dataset and group", tensor=parent)
    with _h5py().File(path, "x") as file:
        for item in [*items, described]:
            if "." in item.name.split("/"):  # a path through the group itself
                raise ConvertError("HDF5 cannot hold this name", tensor=item.name)
            file.create_dataset(item.name, data=item.array(), track_times=False)


def _parents(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _type_name(dataset: Any) -> str:
    return type(dataset.id.get_type()).__name__.removeprefix("Type").removesuffix("ID").lower()


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise ConvertError(f"HDF5 needs h5py: pip install 'kdtr[convert]' ({error})") from error
    module: ModuleType = h5py
    return module


HDF5: Final = Format("hdf5", NUMPY_NATIVE, Hdf5Source, write_hdf5)
