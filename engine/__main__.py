"""python -m engine build | info | toolkit | generate: builds the engine, says what is there, decodes with it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine import abi, build, contents, device, sources, toolkit


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 for a library whose contents are not as they should be, or a decoding that failed on the way; 2
    for what cannot be built or done."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(decodes=list(arguments[:1]) == ["generate"]).parse_args(arguments)
    try:
        status: int = options.run(options)
    except (build.BuildError, abi.EngineError, ValueError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    return status


def _parser(decodes: bool) -> argparse.ArgumentParser:
    """decodes: what it takes to decode, NumPy among others, is loaded; a bare Python can build."""
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="build the library, only what is new, and print its path")
    command.add_argument("--host", action="store_true", help="the kernels for the CPU: needs a C++ compiler alone")
    command.add_argument(
        "--arch",
        metavar="LIST",
        help=f"such as 90 or 90,120 or 80-virtual for PTX; default {','.join(sources.ARCHITECTURES)}",
    )
    command.add_argument("--jobs", type=int, metavar="N", help="compilers at a time; default one a core")
    command.add_argument("--check", action="store_true", help="print what is inside, fail if it is not what was asked")
    command.set_defaults(run=_build)
    command = commands.add_parser("info", help="print devices, library, toolkit and compilers")
    command.set_defaults(run=_info)
    command = commands.add_parser("toolkit", help="print the folder of the CUDA toolkit, or run a command with it")
    command.add_argument("command", nargs=argparse.REMAINDER, help="run with CUDA_HOME and PATH set to the toolkit")
    command.set_defaults(run=_toolkit)
    command = commands.add_parser("generate", help="decode a prompt, show text as it comes, then speed and rounds")
    if decodes:
        from engine import generate

        generate.configure(command)
        command.set_defaults(run=generate.command)
    return parser


def _build(options: argparse.Namespace) -> int:
    if options.host and options.arch:
        raise ValueError("--arch belongs to the CUDA library; the host library has none")
    chosen = sources.architectures(options.arch) if options.arch else None
    plan = build.plan_host() if options.host else build.plan_cuda(chosen)
    built = plan.run(options.jobs)
    print(f"{built.path} ({built.made} files made, {len(built.logs) + 1 - built.made} were there)")
    if options.check:
        return _check(plan, built)
    for file, log in built.logs.items():
        for line in contents.warnings(log):
            print(f"{file}: {line}", file=sys.stderr)
    return 0


def _check(plan: build.Plan, built: build.Built) -> int:
    inside: frozenset[str] = frozenset()
    if plan.targets:
        reader = toolkit.find().tool("cuobjdump")
        if reader is None:
            raise ValueError("--check needs cuobjdump: pip install nvidia-cuda-cuobjdump, or a whole toolkit")
        inside = contents.targets(built.path, reader)
        print(f"inside: {' '.join(sorted(inside))}")
        print(contents.table(kernel for log in built.logs.values() for kernel in contents.kernels(log)))
    faults = contents.faults(plan.targets, inside, built.logs)
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"check failed: {len(faults)} faults" if faults else "check passed")
    return 1 if faults else 0


def _toolkit(options: argparse.Namespace) -> int:
    root = toolkit.find().root
    if not options.command:
        print(root)
        return 0
    path = os.pathsep.join([str(root / "bin"), os.environ.get("PATH", "")])
    environment = {**os.environ, "CUDA_HOME": str(root), "CUDACXX": str(root / "bin" / "nvcc"), "PATH": path}
    try:
        return subprocess.run(options.command, env=environment, check=False).returncode
    except OSError as error:
        raise ValueError(f"{options.command[0]} cannot be run: {error}") from error


def _info(options: argparse.Namespace) -> int:
    """What is missing is said with its reason and is no failure: the same lines on every machine."""
    lines = {
        "host compiler": _said(_host_compiler),
        "toolkit": _said(_found_toolkit),
        "driver": device.driver() or "missing: libcuda.so.1 cannot be loaded",
        "library": _said(lambda: _library(build.plan_cuda)),
        "host library": _said(lambda: _library(build.plan_host)),
    }
    for name, text in lines.items():
        first, *rest = text.splitlines()
        print(f"{name + ':':<15}{first}")
        for line in rest:
            print(f"{'':<15}{line}")
    return 0


def _said(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (build.BuildError, abi.EngineError) as error:
        return f"missing: {error}"


def _host_compiler() -> str:
    program = build.host_recipe().program
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{shutil.which(program)}, {said.splitlines()[0] if said else 'version not known'}"


def _found_toolkit() -> str:
    found = toolkit.find()
    reader = found.tool("cuobjdump") or "missing, needed by `build --check`: pip install nvidia-cuda-cuobjdump"
    return f"{found.version} in {found.root}\ncuobjdump: {reader}"


def _library(planned: Callable[[], build.Plan]) -> str:
    path: Path = planned().path
    if not path.exists():
        option = " --host" if path.name == build.HOST_NAME else ""
        return f"not built for the present sources: python -m engine build{option}"
    found = device.probe(path)
    lines = [str(path), f"built for {found.architectures}"]
    for number, card in enumerate(found.devices):
        lines.append(
            f"device {number}: {card.name}, compute capability {card.compute_capability}, "
            f"{card.multiprocessors} multiprocessors, {card.memory / 2**30:.1f} GiB, {card.shared_memory} bytes of "
            f"shared memory a block, {'usable' if card.usable else 'not usable with this library'}"
        )
    if not found.devices:
        lines.append(f"device: missing: {found.missing}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
