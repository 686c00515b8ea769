"""Arms compared cell by cell: `mode=decoders` times decoders on one draft, `mode=drafters` ways to draft."""
