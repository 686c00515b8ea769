"""Where documents come from: the interpreter's own library, text, JSONL and parquet files, local and hub datasets."""
