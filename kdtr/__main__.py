"""`kdtr` and `python -m kdtr`: look into, check, compare, convert and list KDTR files.

Exit codes: 0 fine; 1 the negative answer (verify, validate: a file breaks the format; diff: they differ; manifest
--check: not as listed); 2 no answer: wrong usage, or a file that cannot be read, carried or written. An error is one
line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from kdtr import commands
from kdtr.console import Console
from kdtr.errors import KDTRError
from kdtr.format import ROLES
from kdtr.metadata import VERSION

Command = Callable[[argparse.Namespace, Console], int]
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    console = Console()
    try:
        args = _parser().parse_args(argv)
        command: Command = args.command
        return command(args, console)
    except SystemExit as end:  # argparse: help, version, usage
        return end.code if isinstance(end.code, int) else commands.TROUBLE
    except KDTRError as error:
        console.complain(str(error))
    except MemoryError as error:
        console.complain(f"not enough memory: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        console.complain(f"IO: {where}{error.strerror or error}")
    except KeyboardInterrupt:
        console.complain("interrupted")
        return _INTERRUPTED
    finally:
        console.close()
    return commands.TROUBLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdtr", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kdtr {VERSION}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=command)
        return sub

    def files(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("file", nargs="+", metavar="FILE.kdtr")

    files(add("ls", commands.ls, "list the tensors of files"))
    sub = add("show", commands.show, "metadata of a file, or statistics of some of its tensors")
    sub.add_argument("file", metavar="FILE.kdtr")
    sub.add_argument("name", nargs="*", metavar="NAME", help="tensor names; * and ? are wildcards")
    files(add("verify", commands.verify, "check checksums, padding and values"))
    files(add("validate", commands.validate, "verify, then check metadata and the rules of the fixture kind"))

    sub = add("diff", commands.diff, "compare with the tolerances of the golden file, or bit for bit")
    sub.add_argument("golden", metavar="GOLDEN.kdtr")
    sub.add_argument("actual", metavar="ACTUAL.kdtr")
    whole = "every difference of the two files, metadata included"
    sub.add_argument("--all", dest="command", action="store_const", const=commands.diff_all, help=whole)

    sub = add(
        "convert", commands.convert_file, "to or from .npz, .safetensors, .h5, .hdf5; lossless, or refused by name"
    )
    sub.add_argument("source")
    sub.add_argument("target")
    sub.add_argument("--kind", default="any", help="fixture kind of a KDTR file made from a foreign one (any)")
    sub.add_argument("--role", default="none", choices=ROLES, help="role of its tensors (none)")
    sub.add_argument("--drop", action="append", default=[], metavar="NAME", help="leave a tensor out; * and ? match")
    sub.add_argument("--drop-attributes", action="store_true", help="leave out the attributes of HDF5")
    sub.add_argument("--force", action="store_true", help="replace an existing target")

    sub = add(
        "extract", commands.extract_tensors, "write tensors as .npy, or as their bytes where NumPy lacks the type"
    )
    sub.add_argument("file", metavar="FILE.kdtr")
    sub.add_argument("folder")
    sub.add_argument("name", nargs="*", metavar="NAME", help="tensor names; * and ? are wildcards (all)")
    sub.add_argument("--raw", action="store_true", help="write the payload's bytes (.bin) for every tensor")
    sub.add_argument("--force", action="store_true", help="replace existing files")

    sub = add(
        "manifest",
        commands.manifest_file,
        "list data files with their SHA-256, check them, or bring the list up to date",
    )
    sub.add_argument("file", metavar="MANIFEST.toml")
    mode = sub.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="name every missing, extra and changed file")
    mode.add_argument(
        "--update", action="store_true", help="take the sums of what lies there; makes the list if missing"
    )
    sub.add_argument(
        "--folder", action="append", default=[], help="folder, relative to the manifest, without other files"
    )
    for key in ("licence", "generator"):
        sub.add_argument(f"--{key}", help=f"{key} of new files (else from a KDTR file's metadata)")
    sub.add_argument("--seed", type=_seed, help="seed of new files (else from a KDTR file's metadata)")
    return parser


def _seed(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


if __name__ == "__main__":
    sys.exit(main())
