"""Warp-specialized kernels for Hopper, in Gluon on stock Triton 3.6 to 3.9. Private; imported on first use."""
