"""Portable Triton kernels and the functions that launch them. Private; imported when the first GPU tensor arrives."""
