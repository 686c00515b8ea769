"""Write a GGUF file's model as a folder in transformers format, for engines that take no such file.

python scripts/unpack_gguf.py runs/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/models/smollm2_folder

The weights are the numbers that the file's blocks stand for, in float32, so that heads trained on the file fit the
folder; it takes as much room as an unquantised model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from decode.common.errors import InputError, UserError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from decode.models.load import load_model


def unpack(file: str, folder: Path) -> None:
    """Model, tokenizer and generation settings of `file` in a new `folder`; InputError where one of them cannot be."""
    if not Path(file).is_file():
        raise InputError(f"{file} is no file; give a GGUF file, e.g. runs/models/x.gguf")
    if folder.exists():
        raise InputError(f"{folder} exists already, and nothing is overwritten; give a new folder")
    source = ModelConfig(path=file, device="cpu")
    tokenizer = describe_model(source).tokenizer
    load_model(source).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/unpack_gguf.py FILE.gguf FOLDER")
    try:
        unpack(sys.argv[1], Path(sys.argv[2]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
