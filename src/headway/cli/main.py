"""The verbs of `headway`."""

import sys

import click

from headway import __version__
from headway.cli.compare import compare
from headway.cli.jobs import jobs
from headway.cli.report import report
from headway.cli.watch import watch
from headway.errors import HeadwayError, nearest


class Verbs(click.Group):
    """A group that names the nearest verb when it does not know one, and prints headway's errors without a trace."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no verb {args[0]!r}: {nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Runs the verb."""
        try:
            return super().invoke(ctx)
        except HeadwayError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            sys.stderr.close()
            raise SystemExit(1) from None


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="headway")
def main() -> None:
    """See where a PyTorch job's time goes, and give more of it to training.

    Jobs live in $HEADWAY_HOME (default ~/.headway). JOB is a name from `headway jobs`; without one, the job that was
    active last is meant.
    """


for verb in (jobs, report, watch, compare):
    main.add_command(verb)
