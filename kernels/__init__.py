"""Triton kernels, each beside its torch reference. Importing this package imports no Triton; importing a module of it does."""
