"""As `hooked`, in a process that starts with `HEADWAY_FAST_START=all`."""

import hooked  # noqa: F401
