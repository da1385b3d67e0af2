"""Kernels and SSD engines of lohan, in C++17."""
