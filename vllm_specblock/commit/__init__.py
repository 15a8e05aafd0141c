"""Commit of accepted paths: KV entries and the rows that drafters read."""
