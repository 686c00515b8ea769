"""Kill a training run with SIGKILL at random instants, resume it each time, and compare it with an uninterrupted one.

python scripts/kill_resume.py --kills 50 --engine single
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.train.kills import differences, finish, random_kills, run_with_kills
from tests.train.toy import command, save_target, tiny_settings, write_corpus, write_records


def main() -> int:
    """0 where weights and log are the same, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how often the run is killed")
    parser.add_argument("--engine", choices=["single", "ddp"], default="single", help="ddp runs 2 processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants")
    options = parser.parse_args()
    alone = (sys.executable,)
    launcher = alone if options.engine == "single" else (*alone, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    with tempfile.TemporaryDirectory() as folder:
        found = _compare(Path(folder), launcher, options)
    sys.stdout.write("identical: weights bit for bit, the log line for line\n" if not found else f"{found}\n")
    return 1 if found else 0


def _compare(folder: Path, launcher: tuple[str, ...], options: argparse.Namespace) -> list[str]:
    target, corpus = save_target(folder / "target"), write_corpus(folder / "corpus")
    records = write_records(folder / "records", target, corpus)
    settings = tiny_settings(
        folder / "whole",
        target,
        records=str(records),
        engine={"name": options.engine},
        steps=20 * max(10, options.kills),
        checkpoint_every=4,
        validate_every=6,
        log_every=5,
    )
    finish(command(settings, launcher))
    settings |= {"output_dir": str(folder / "killed"), "resume": "auto"}
    kills = random_kills(options.kills, options.seed, longest_s=1.0)
    hits = run_with_kills(command(settings, launcher), folder / "killed", kills)
    for what in sorted(set(hits)):
        sys.stdout.write(f"killed in {what}: {hits.count(what)} times\n")
    return differences(folder / "whole", folder / "killed")


if __name__ == "__main__":
    sys.exit(main())
