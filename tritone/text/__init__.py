"""From tokens to text that may be shown: incremental decoding and stop strings."""
