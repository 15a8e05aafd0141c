"""N-gram drafter: continuations from the request's own text."""
