"""What all drafters share: layers, RoPE, chunked advance."""
