"""``python -m sublet ...``: the ``sublet`` command that the package carries."""

from __future__ import annotations

import os
import sys

from sublet._library import command_path


def main() -> None:
    """Becomes the command, so that signals and the exit code are the command's own."""
    command = command_path()
    try:
        os.execv(command, [command, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"sublet: cannot start {command}: {error}; install the package again")


if __name__ == "__main__":
    main()
