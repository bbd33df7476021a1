"""The command in a test: run it, read its refusal, let its disk be full."""

import errno
import os
from pathlib import Path

from typer.testing import CliRunner

from retrograde import cli


def run(*arguments, app=cli.app):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result):
    """The one message of a command that was refused, on one line."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def full_after(write, *names):
    """The same write, which a full disk breaks off for some files."""

    def broken(self, *arguments, **options):
        written = write(self, *arguments, **options)
        path = self if isinstance(self, Path) else arguments[0]
        if path.name in names:
            os.truncate(path, 1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    return broken
