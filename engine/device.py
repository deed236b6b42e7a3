"""Which devices the engine sees, asked through its own library: neither CuPy nor a toolkit is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from engine import abi


@dataclass(frozen=True)
class Device:
    """One device. memory, shared_memory: bytes, the latter what a block may ask for.

    usable: the library holds code for it.
    """

    name: str
    compute_capability: str
    multiprocessors: int
    memory: int
    shared_memory: int
    usable: bool


@dataclass(frozen=True)
class Probe:
    """What a library and the driver say. driver: its newest CUDA version, "13.0", None without one."""

    architectures: str
    driver: str | None
    devices: tuple[Device, ...]

    @property
    def missing(self) -> str | None:
        """Why nothing can run here, or None."""
        if self.driver is None:
            return "no CUDA driver: libcuda.so.1 cannot be loaded"
        if not self.devices:
            return f"no CUDA device (the driver, CUDA {self.driver}, is there)"
        if not any(device.usable for device in self.devices):
            cards = ", ".join(f"{d.name} (compute capability {d.compute_capability})" for d in self.devices)
            return f"the library is built for {self.architectures}, which does not fit {cards}"
        return None


def probe(path: Path) -> Probe:
    """Asks the library at `path`. Raises abi.LibraryError, or abi.EngineError with CUDA's own words."""
    library = abi.Library(path)
    count = ctypes.c_int32()
    _ask(library, "device_count", count)
    devices = []
    for number in range(count.value):
        info = abi.DeviceInfo(struct_size=ctypes.sizeof(abi.DeviceInfo), device=number)
        _ask(library, "device_query", info)
        devices.append(
            Device(
                name=info.name.decode(errors="replace"),
                compute_capability=f"{info.compute_capability // 10}.{info.compute_capability % 10}",
                multiprocessors=info.multiprocessors,
                memory=info.total_memory,
                shared_memory=info.shared_memory_optin,
                usable=bool(info.usable),
            )
        )
    return Probe(library.function("architectures", ctypes.c_char_p)().decode(), driver(), tuple(devices))


def driver() -> str | None:
    """The newest CUDA version that the driver serves, "13.0"; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _ask(library: abi.Library, name: str, answer: ctypes.Structure | ctypes.c_int32) -> None:
    status = library.function(name, ctypes.c_int32, ctypes.c_void_p)(ctypes.byref(answer))
    if status:
        library.check(name, status)
