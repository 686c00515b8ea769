"""`data=everyday`: chat prompts as people ask them, eight kinds of forty-eight topics."""

from distill.corpora.everyday.chats import KINDS, everyday_chats

__all__ = ["KINDS", "everyday_chats"]
