"""Write the texts of records as chats, a JSON line each: the CHATS of `python scripts/training_peers`.

    python scripts/training_peers/chats.py RECORDS TOKENIZER chats.jsonl

RECORDS are answers of SmolLM2-135M-Instruct (`experiment=smollm2_families` has the command), TOKENIZER its folder.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere, as a script

from decode.config import ModelConfig  # noqa: E402
from decode.models.compatibility import load_tokenizer  # noqa: E402
from distill.records.record_folder import RecordFolder  # noqa: E402

MOST_TOKENS = 2048
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)


def main(records: str, tokenizer: str, chats: str) -> None:
    """Of both splits, without the template's own system message and without empty answers."""
    folder, reads = RecordFolder.open(records), load_tokenizer(ModelConfig(path=tokenizer))
    with open(chats, "w", encoding="utf-8") as file:
        for index in [one for split in ("train", "validation") for one in folder.indices(split)]:
            turns = TURN.findall(str(reads.decode(folder.read(index, stores=(), layers=()).ids[:MOST_TOKENS])))
            messages = [{"role": role, "content": text} for role, text in turns if role != "system"]
            if messages[-1]["role"] == "assistant" and messages[-1]["content"].strip():
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
