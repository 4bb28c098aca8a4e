"""What `import headway` adds to a Python that imports nothing, and that it leaves torch alone."""

import subprocess
import sys

from bench.measure import Row, children_ms, take_turns

IMPORT, USE = "import headway", "import headway; headway.current"
CHECK = "import sys, headway; headway.current; sys.exit('torch' in sys.modules)"


def run(quick: bool) -> list[Row]:
    """The rows on imports."""
    code = {"bare": "pass", "plain": IMPORT, "used": USE}
    timed = {name: (lambda text=text: children_ms([sys.executable, "-c", text])) for name, text in code.items()}
    samples = take_turns(7 if quick else 25, **timed)
    added = {
        name: [took - bare for took, bare in zip(samples[name], samples["bare"], strict=True)]
        for name in ("plain", "used")
    }
    torch = subprocess.run([sys.executable, "-c", CHECK], check=False).returncode
    return [
        Row("import headway", "ms", added["plain"], at_most=50.0),
        Row("… and its first name", "ms", added["used"], note="what a script that calls headway.current() pays"),
        Row("… imports torch", "times", [float(bool(torch))], at_most=0.0),
    ]
