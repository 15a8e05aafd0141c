"""The Python side of the emulated GPU; `sitecustomize.py` installs its modules."""
