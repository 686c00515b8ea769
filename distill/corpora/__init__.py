"""Where documents come from: the interpreter's own library, text, JSONL and parquet files, local and hub datasets."""

from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus, Document, Split

__all__ = ["Corpus", "Document", "Split", "load_corpus"]
