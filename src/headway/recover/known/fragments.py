"""What several patterns have in common."""

Table = dict[str, dict[str, tuple[str, ...]]]
"""Category, name of the rule, and the messages that speak for the category."""


def xid(*numbers: int) -> str:
    """NVIDIA's driver reporting one of these events: `NVRM: Xid (PCI:0000:3b:00): 79, pid=…`, or `Xid 79` elsewhere."""
    which = "|".join(map(str, numbers))
    return (
        rf"\bxid\b(?: ?\([^)]{{0,60}}\))?(?: errors?| code| event)?(?: detected)?\s?[:=]?\s?\(?(?:{which})\b(?![.:]\d)"
    )


def exited(code: int) -> str:
    """A process, or a container, that ended with this code: `exit status 137`, `"exitCode": 137`, `exit_code: 137`."""
    return rf"exit(?:ed)?(?: with)?(?: exit)?[ _]?(?:code|status)?[\"']?[ :=]+{code}\b"


ABSENT = r"(?!.{0,40}[:=]\s*(?:0|no|none|n/a|false)\b)"
"""Not a counter that stands at zero, as health reports list them."""

ERROR_BEFORE = r"(?:error|errno|fail\w*|cannot|can't|could not|unable|exception|fatal|: )"

SHELL = r"(?:^|: line \d+: +\d+ |tasks? [\d,\-]+: |: \d+ +|\d+ |zsh: )"
"""Where a shell or srun tells what a process died of."""
