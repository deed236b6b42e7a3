"""One exception class per error class of the format (kdtr/format.py, section 9), with the class's name in `code`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final


class KDTRError(Exception):
    """Base of all errors of this library: what is wrong, in which file and, where one is concerned, in which tensor."""

    code: ClassVar[str] = "KDTR"

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.tensor = tensor

    def __str__(self) -> str:
        parts = [self.code]
        if self.path is not None:
            parts.append(self.path)
        if self.tensor is not None:
            parts.append(f"tensor '{self.tensor}'")
        return ": ".join([*parts, self.message])


class NotKdtrError(KDTRError):
    """Does not start with the magic."""

    code = "NOT_KDTR"


class TruncatedError(KDTRError):
    """Shorter than it says."""

    code = "TRUNCATED"


class VersionError(KDTRError):
    """Another major version."""

    code = "VERSION"


class HeaderSumError(KDTRError):
    """The header is damaged."""

    code = "HEADER_SUM"


class UnsupportedError(KDTRError):
    """Needs a feature, role or compare mode that this reader does not know."""

    code = "UNSUPPORTED"


class HeaderError(KDTRError):
    """A header field has a value that no writer may give it."""

    code = "HEADER"


class LimitError(KDTRError):
    """Larger than the format allows."""

    code = "LIMIT"


class TrailingError(KDTRError):
    """Longer than it says."""

    code = "TRAILING"


class PrefixSumError(KDTRError):
    """Index, names or metadata are damaged."""

    code = "PREFIX_SUM"


class PaddingError(KDTRError):
    """Padding that is not zero."""

    code = "PADDING"


class IndexRecordError(KDTRError):
    """The index does not describe the names."""

    code = "INDEX"


class TensorNameError(KDTRError):
    """A name outside the grammar, twice, or out of order."""

    code = "NAME"


class DTypeError(KDTRError):
    """Unknown element type."""

    code = "DTYPE"


class ShapeError(KDTRError):
    """Impossible shape, or a size that does not follow from it."""

    code = "SHAPE"


class LayoutError(KDTRError):
    """A payload is not where it has to be."""

    code = "LAYOUT"


class CompareError(KDTRError):
    """A tolerance that cannot be applied."""

    code = "COMPARE"


class DataSumError(KDTRError):
    """A payload is damaged."""

    code = "DATA_SUM"


class DataValueError(KDTRError):
    """A payload holds bits that its element type does not allow."""

    code = "VALUE"


class MetaError(KDTRError):
    """Metadata or the kind's schema are violated; `problems` lists each violation."""

    code = "META"

    def __init__(
        self, message: str, *, path: str | None = None, tensor: str | None = None, problems: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, path=path, tensor=tensor)
        self.problems = problems or (message,)


class NotFoundError(KDTRError, KeyError):
    """No tensor of this name."""

    code = "NOT_FOUND"


class TensorTypeError(KDTRError, TypeError):
    """The element type cannot be held, or not in the way asked for."""

    code = "TYPE"


class FileIOError(KDTRError, OSError):
    """The system refused to open, read or write."""

    code = "IO"


class EncodeError(KDTRError, ValueError):
    """Refused to write: no file is made, and one of the same name is left as it is."""

    code = "ENCODE"


# The classes of the format; what other modules derive (converting, manifests) is not among them.
BY_CODE: Final[Mapping[str, type[KDTRError]]] = MappingProxyType(
    {cls.code: cls for cls in KDTRError.__subclasses__()},
)
