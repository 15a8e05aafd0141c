"""Exchange of requests and versions between an engine and its trainer."""
