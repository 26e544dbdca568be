"""Number formats that the kernels share, and offline tools that turn a floating-point checkpoint into a quantised one."""
