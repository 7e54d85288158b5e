"""What other encodings of a cache cost the model."""
