"""What vLLM's own configuration reads from words of its command line: a JSON line {"words", "most"} in, {"k": draft
tokens at batch sizes 1 to most} out. Run by the interpreter of .venv-vllm."""

import json
import sys


def main() -> None:
    """One question."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]
    from vllm.v1.spec_decode.dynamic.utils import (  # pyright: ignore[reportMissingImports]
        build_dynamic_sd_schedule_lookup,
    )

    asked = json.loads(sys.stdin.read())
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    config = EngineArgs.from_cli_args(parser.parse_args(asked["words"])).create_engine_config()
    spec = config.speculative_config
    table = build_dynamic_sd_schedule_lookup(
        spec.num_speculative_tokens_per_batch_size, asked["most"], spec.num_speculative_tokens
    )
    print(json.dumps({"k": table[1:]}), file=sys.__stdout__)


if __name__ == "__main__":
    main()
