"""Mistakes of the user's, each told in one sentence that names the file, flag or tensor and the way out; exit code 2.

    require(width == 16, f"{file} has blocks of {width}; NVFP4 has 16")     # raises UserError(sentence)

Every script ends on a `UserError` with its sentence on stderr. Faults of the program itself keep their traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path


class UserError(ValueError):
    """A mistake in the user's files or flags, told in one sentence that names the place and the way out."""


def require(sound, sentence: str) -> None:
    if not sound:
        raise UserError(sentence)


def read_json(folder: Path, name: str) -> dict:
    """The object in a JSON file of `folder`, empty if there is no such file; UserError when it holds something else."""
    file = folder / name
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{file} cannot be read as JSON ({error}); is the copy complete?") from error
    require(isinstance(content, dict), f"{file} holds no JSON object; is the copy complete?")
    return content


def end_in_a_sentence(main: Callable[[], None]) -> None:
    """Run a script of one process: a user's mistake ends it with its sentence on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
