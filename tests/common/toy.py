"""A stage of its own (`toystage`) with its own conf folder, for tests of the command line."""

import textwrap
from pathlib import Path

_FILES = {
    "conf/toystage.yaml": """
        defaults:
          - experiment: null
          - optim: sgd
          - _self_
        output_dir: runs/toy
        resume: never
        plan: false
        seed: 0
        outcome: done
    """,
    "conf/optim/sgd.yaml": "name: sgd\n",
    "conf/optim/adam.yaml": "name: adam\nlr: 0.01\n",
    "conf/experiment/long.yaml": "# @package _global_\nsteps: 1000\n",
    "toystage/__init__.py": "",
    "toystage/config.py": """
        from dataclasses import dataclass, field
        from typing import Literal
        from decode.common.typed_config import require

        @dataclass
        class Optim:
            name: Literal["sgd", "adam"] = "sgd"
            lr: float = 0.1

            def __post_init__(self):
                require(self.lr > 0, f"lr = {self.lr} must be positive.")

        @dataclass
        class Config:
            output_dir: str
            resume: str = "never"
            plan: bool = False
            seed: int = 0
            steps: int = 10
            outcome: Literal["done", "input_error", "run_error", "broken_pipe", "interrupted"] = "done"
            optim: Optim = field(default_factory=Optim)
            extra: Optim | None = None
    """,
    "toystage/stage.py": """
        from pathlib import Path
        from decode.common.errors import InputError, RunError
        from decode.common.checked_json import write_json
        from decode.common.run_folder import open_run

        def run(config):
            if config.outcome == "input_error":
                raise InputError("no such file")
            if config.outcome == "run_error":
                raise RunError("loss is NaN")
            if config.outcome == "broken_pipe":
                raise BrokenPipeError("the worker is gone")
            if config.outcome == "interrupted":
                raise KeyboardInterrupt
            with open_run(config.output_dir, "toystage", config, config.resume) as folder:
                if Path("on_the_way").exists():
                    raise {"crash": ZeroDivisionError, "disk": OSError, "ctrl-c": KeyboardInterrupt}[
                        Path("on_the_way").read_text()
                    ]("no more")
                if not folder.is_finished:
                    write_json(folder.file("seen.json"), {"steps": config.steps, "lr": config.optim.lr})
                    folder.finish({"figures": {"score": config.optim.lr}})
    """,
    "toystage/__main__.py": """
        import sys
        from pathlib import Path
        from decode.common import compose
        from decode.common.command_line import stage_main
        from decode.common.sweep_table import Figures

        compose.CONF = Path(__file__).resolve().parents[1] / "conf"
        if __name__ == "__main__":
            stage_main("toystage", "toystage.config:Config", "toystage.stage:run", Figures({}))
    """,
}


def write_toy_stage(folder: Path) -> None:
    """Write the stage's package and conf folder under `folder`."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
