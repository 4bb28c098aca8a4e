"""What commands on stored files share: a store's refusal is an error without a trace, and long work has a bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headway.errors import PlatformError


class Stored(click.Group):
    """A group in which a disk's or a store's refusal is an error without a trace."""

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise PlatformError(f"{error.filename or 'the store'}: {error.strerror or error}.") from error


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one, and what moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
