"""The parts of `make bench-precision`."""
