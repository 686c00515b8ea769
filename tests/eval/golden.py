"""What results.json of each mode holds, key by key: runs of earlier versions are published, pooled and drafted by.

After a wanted change: `GOLDEN=write pytest -m "slow or not slow" tests/eval` writes golden.json; read its difference.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden.json")
OF_THE_MACHINE = ("packages", "git", "operators_ms_per_round")
"""Keys below these depend on what is installed, or on what was called there."""


def check_keys(results: dict[str, Any], mode: str) -> None:
    """The toy's results of a mode have the keys they always had; values differ from run to run."""
    golden, found = json.loads(GOLDEN.read_text()), sorted(set(paths(results)))
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(dict(sorted((golden | {mode: found}).items())), indent=1) + "\n")
        return
    assert found == golden[mode]


def paths(value: Any) -> Iterator[str]:
    """Of all values, `.rows.alpha` say; a list's entries share theirs."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from paths(one)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            rest = [""] if name in OF_THE_MACHINE else paths(inner)
            yield from (f".{name}{path}" for path in rest)
    else:
        yield ""
