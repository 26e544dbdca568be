"""Model families: decoders and voices."""
