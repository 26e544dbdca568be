"""C sources of the native kernels; a package so that they are installed with it."""
