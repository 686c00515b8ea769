"""Where documents come from: the interpreter's own library, text, JSONL and parquet files, local and hub datasets."""

from distill.corpora.base import Corpus, Document, Split
from distill.corpora.load import load_corpus

__all__ = ["Corpus", "Document", "Split", "load_corpus"]
