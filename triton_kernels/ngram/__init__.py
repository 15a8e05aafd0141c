"""N-gram lookup: earlier occurrences of a text's end, and their continuations."""
