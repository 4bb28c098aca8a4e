"""The verbs of `headway`."""

import sys
from importlib import import_module

import click

from headway import __version__
from headway.errors import HeadwayError, nearest

VERBS = {
    "run": "headway.cli.run:run",
    "exec": "headway.cli.exec:exec_command",
    "inject": "headway.cli.inject:inject",
    "doctor": "headway.cli.doctor:doctor",
    "import": "headway.cli.import_:import_",
    "jobs": "headway.cli.jobs:jobs",
    "report": "headway.cli.report:report",
    "watch": "headway.cli.watch:watch",
    "compare": "headway.cli.compare:compare",
    "failures": "headway.cli.failures:failures",
    "checkpoint": "headway.cli.checkpoint:checkpoint",
    "cache": "headway.cli.cache:cache",
    "compile": "headway.cli.compile:compile_",
    "startup": "headway.cli.startup:startup",
    "publish": "headway.cli.publish:publish",
}
"""Where each verb is. One is loaded when it is called: `exec` stands before a job, and must not take its time."""


class Verbs(click.Group):
    """A group that names the nearest verb when it does not know one, and prints headway's errors without a trace."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name; None if there is none."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments."""
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            ctx.fail(f"there is no verb {args[0]!r}: {nearest(args[0], VERBS)}")
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
