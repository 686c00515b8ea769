"""Hidden states that a folder is made for and leaves unread, and what to do about a key that is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from train.check.subject import Finding, Subject

WRITE = "Write it as the draft was trained"


def unread(subject: Subject) -> Iterator[Finding]:
    """Hidden states that the folder is made for, and that it says are not used."""
    fields = subject.folder.fields
    for where in ("eagle_config", "dflash_config"):
        if (fields.get(where) or {}).get("use_aux_hidden_state") is False and "fc.weight" in subject.folder.stored:
            yield Finding(
                f"{where} has use_aux_hidden_state=false, and the folder holds fc.weight",
                "vLLM leaves fc.weight aside, and gives the draft the target's last state in place of those it reads",
                "Write true",
            )
