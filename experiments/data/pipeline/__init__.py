"""The build: raw text to a filtered, deduplicated, tokenized corpus, by ``[stage]`` of a TOML file.

``config`` says what may stand in the file, ``readers`` turns files into records, ``stages`` runs
a stage over shards so that it continues after a kill, and one module each cleans, scores,
tokenizes. ``build`` is the order of them all. Every stage is also a function on a stream of
documents.
"""
