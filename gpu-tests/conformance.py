"""Does the real driver pass the same conformance list as the simulated one, and do both forbid the same calls during captures?

Runs `bin/conformance_gpu` with a deadline and records its verdict. Bound: some hundred driver calls of at most
a few ms each; a minute is a hang.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import captured_calls
import cli
import common
from common import JobError, Result
from suite import main, options


def parse(argv: list[str]) -> Any:
    """The options; what follows `--` goes to the program."""
    own, theirs = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = options(__doc__, 120)(own)
    args.program_args = theirs
    return args


def verdict(text: str) -> str:
    """How many cases passed and failed, as the program's last line says it."""
    totals = re.findall(r"^\d+ passed, \d+ failed$", text, re.MULTILINE)
    return str(totals[-1]) if totals else "no totals in its output"


def body(args: Any, result: Result, work: Path) -> None:
    """Runs it."""
    program = cli.find_beside("SUBLET_CONFORMANCE", "bin/conformance_gpu")
    if not Path(program).exists():
        raise JobError(f"{program} is missing: make the bundle again")
    output = work / "conformance.log"
    began = time.perf_counter()
    child = common.spawn([program, *args.program_args], common.child_env(), output)
    common.wait_until("the end of the conformance run", lambda: child.poll() is not None, args.deadline - 10)
    result.sample("seconds", time.perf_counter() - began)
    text = output.read_text(errors="replace")
    result.data["output_tail"] = text[-6000:]
    print(text[-3000:])
    result.check("conformance on the real driver", child.returncode == 0, f"exit {child.returncode}; {verdict(text)}")
    found = captured_calls.differences(captured_calls.table())
    result.check("what captures forbid is what the simulated driver forbids", not found, "; ".join(found))


if __name__ == "__main__":
    main(parse, "conformance", body)
