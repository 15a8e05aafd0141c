"""The folder between an engine and its trainer: requests one way, versions the other."""
