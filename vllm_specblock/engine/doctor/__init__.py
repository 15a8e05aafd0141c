"""What keeps an engine from drafting, or would: found before one is started."""
